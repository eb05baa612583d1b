// Random generators, and the table by which torch asks about CUDA.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "memory.h"

namespace simulated {

// Counts as CUDA's does: a seed and an offset, 16 bytes of state, and every kernel that draws takes four numbers more.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index)
      : GeneratorImpl(Device(c10::kCUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        on_host_(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  uint64_t current_seed() const override { return seed_; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK_TYPE(
        state.device().is_cpu() && state.numel() == 16 && state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
        "RNG state must be a torch.ByteTensor of 16 bytes");
    const auto* numbers = static_cast<const uint64_t*>(state.data());
    seed_ = numbers[0], offset_ = numbers[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte);
    auto* numbers = static_cast<uint64_t*>(state.data_ptr());
    numbers[0] = seed_, numbers[1] = offset_;
    return state.getIntrusivePtr();
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->seed_ = seed_, copy->offset_ = offset_;
    return copy;
  }

  // The CPU generator from which the next kernel draws.
  at::Generator next() {
    std::lock_guard<std::mutex> hold(mutex_);
    on_host_.set_current_seed(seed_ * 0x9E3779B97F4A7C15ULL + offset_);
    offset_ += 4;
    return on_host_;
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
  at::Generator on_host_;
};

inline std::vector<at::Generator>& default_generators() {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int index = 0; index < kMaxDevices; index++) made.push_back(at::make_generator<Generator>(index));
    return made;
  }();
  return all;
}

inline Generator& simulated_generator(const at::Generator& generator) {
  return *static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
}

struct Hooks final : at::CUDAHooksInterface {
  static DeviceIndex or_current(DeviceIndex index) { return index < 0 ? simulated::current_device : index; }

  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generators()[or_current(index)];
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(or_current(index));
  }
  Device getDeviceFromPtr(void*) const override { return Device(c10::kCUDA, simulated::current_device); }
  bool isPinnedPtr(const void* pointer) const override { return PinnedAllocator::is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(num_devices); }
  int getNumGPUs() const override { return num_devices; }
  DeviceIndex current_device() const override { return simulated::current_device; }
  DeviceIndex getCurrentDevice() const override { return simulated::current_device; }
  void setCurrentDevice(DeviceIndex index) const override {
    check_index(index);
    simulated::current_device = index;
  }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    const auto before = simulated::current_device;
    if (index >= 0) setCurrentDevice(index);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  void deviceSynchronize(DeviceIndex index) const override { Guard().synchronizeDevice(index); }
};

// Torch has asked for its hooks before this library is loaded, and keeps the object it got. That object and ours have
// no data of their own, so it becomes ours by taking over the table of functions. This holds for the C++ ABI and the
// torch version that `build.py` names.
inline void install_hooks() {
  static const Hooks ours;
  auto* theirs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(theirs) = *reinterpret_cast<void* const*>(&ours);
}

}  // namespace simulated

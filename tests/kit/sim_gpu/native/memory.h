// Memory of the device and pinned memory of the host.
//
// Device memory is host memory under an address that does not exist: the true one with bit 55 set, which no process can
// map. Kernels take the bit away; whatever else reads or writes through the pointer of a device's tensor ends in a
// segmentation fault, as on a machine with a GPU.
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "device.h"

namespace simulated {

constexpr uintptr_t kDeviceBit = uintptr_t{1} << 55;

inline void* device_address(const void* host) {
  return host == nullptr ? nullptr : reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(host) | kDeviceBit);
}
inline void* host_address(const void* device) {
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(device) & ~kDeviceBit);
}

struct Usage {
  std::atomic<int64_t> total_bytes{int64_t{80} << 30};
  std::atomic<int64_t> limit_bytes{int64_t{80} << 30};
  std::atomic<int64_t> allocated_bytes{0};
  std::atomic<int64_t> peak_bytes{0};
};
inline std::array<Usage, kMaxDevices> usage;

// Counts an allocation in, or refuses it as the caching allocator would.
inline void charge(DeviceIndex index, int64_t num_bytes) {
  Usage& device = usage[index];
  const int64_t after = device.allocated_bytes += num_bytes;
  if (num_bytes > 0 && after > device.limit_bytes) {
    device.allocated_bytes -= num_bytes;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", num_bytes, " bytes. GPU ", int(index),
        " has a total capacity of ", device.total_bytes.load(), " bytes of which ",
        device.limit_bytes - (after - num_bytes), " bytes is free.");
  }
  int64_t peak = device.peak_bytes;
  while (after > peak && !device.peak_bytes.compare_exchange_weak(peak, after)) {
  }
}

inline void traced(void* pointer, bool is_new) {
  trace([&](auto& to) {
    if (is_new) to.trace_gpu_memory_allocation(c10::kCUDA, as_number(pointer));
    else to.trace_gpu_memory_deallocation(c10::kCUDA, as_number(pointer));
  });
}

// What a device's DataPtr owns: a block of its own, or the storage that a CPU kernel has made for its result.
struct Block {
  DeviceIndex device;
  size_t num_bytes;
  void* host;
  c10::intrusive_ptr<c10::StorageImpl> made_by_kernel;

  ~Block() {
    traced(device_address(host), false);
    if (!made_by_kernel) std::free(host);
    usage[device].allocated_bytes -= static_cast<int64_t>(num_bytes);
  }
  static void drop(void* block) { delete static_cast<Block*>(block); }
};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override { return allocate_on(current_device, num_bytes); }

  static c10::DataPtr allocate_on(DeviceIndex index, size_t num_bytes) {
    charge(index, static_cast<int64_t>(num_bytes));
    void* host = nullptr;
    if (num_bytes > 0) {
      TORCH_CHECK(posix_memalign(&host, 512, num_bytes) == 0, "The host has no memory left for a simulated device.");
      std::memset(host, 0xA5, num_bytes);  // whoever reads it before writing shall notice
    }
    traced(device_address(host), true);
    return {device_address(host), new Block{index, num_bytes, host, {}}, &Block::drop, Device(c10::kCUDA, index)};
  }

  static c10::DataPtr adopt(const c10::Storage& made, DeviceIndex index) {
    charge(index, static_cast<int64_t>(made.nbytes()));
    void* host = made.mutable_data();
    traced(device_address(host), true);
    auto* block = new Block{index, made.nbytes(), host, made.getWeakStorageImpl().lock()};
    return {device_address(host), block, &Block::drop, Device(c10::kCUDA, index)};
  }

  void copy_data(void* to, const void* from, size_t num_bytes) const override {
    std::memcpy(host_address(to), host_address(from), num_bytes);
  }
};
inline DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(c10::kCUDA, &device_allocator)

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    void* host = nullptr;
    if (num_bytes > 0) {
      TORCH_CHECK(posix_memalign(&host, 512, num_bytes) == 0, "The host has no memory left to pin.");
      std::lock_guard<std::mutex> hold(lock);
      blocks[as_number(host)] = num_bytes;
    }
    return {host, host, &release, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t num_bytes) const override { std::memcpy(to, from, num_bytes); }

  static void release(void* host) {
    {
      std::lock_guard<std::mutex> hold(lock);
      blocks.erase(as_number(host));
    }
    std::free(host);
  }
  static bool is_pinned(const void* pointer) {
    const auto address = reinterpret_cast<uintptr_t>(pointer);
    std::lock_guard<std::mutex> hold(lock);
    auto above = blocks.upper_bound(address);
    if (above == blocks.begin()) return false;
    --above;
    return address < above->first + above->second;
  }

  static inline std::mutex lock;
  static inline std::map<uintptr_t, size_t> blocks;
};
inline PinnedAllocator pinned_allocator;

inline void resize_storage(const c10::Storage& storage, size_t num_bytes) {
  if (num_bytes == storage.nbytes()) return;
  auto next = DeviceAllocator::allocate_on(storage.device().index(), num_bytes);
  if (const size_t kept = std::min(num_bytes, storage.nbytes()))
    std::memcpy(host_address(next.get()), host_address(storage.data()), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(next));
  storage.unsafeGetStorageImpl()->set_nbytes(num_bytes);
}

}  // namespace simulated

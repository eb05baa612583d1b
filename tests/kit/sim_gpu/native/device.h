// Devices, streams and events. Kernels run at once on the calling thread, so a stream orders nothing and every event has
// happened when it is asked for; torch's CUDA sanitizer is told all of it and finds what streams would have left
// unordered.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

namespace simulated {

using c10::Device;
using c10::DeviceIndex;

constexpr int kMaxDevices = 16;

inline int num_devices = 1;
inline thread_local DeviceIndex current_device = 0;
inline thread_local std::unordered_map<DeviceIndex, c10::StreamId> current_streams;
inline std::atomic<c10::StreamId> next_stream{1};
inline std::atomic<uintptr_t> next_event{1};

inline void check_index(DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < num_devices, "CUDA error: invalid device ordinal");
}

inline DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }

// ------------------------------------------------------------------------------------------ what the host does
// A Python function of (kind, detail) hears of launches, host synchronisations and copies, in the thread that makes them.
inline std::atomic<bool> is_observed{false};
inline PyObject* observer = nullptr;

inline void tell(const char* kind, const std::string& detail) {
  if (!is_observed.load() || !Py_IsInitialized()) return;
  py::gil_scoped_acquire gil;
  if (observer == nullptr) return;
  PyObject* answer = PyObject_CallFunction(observer, "ss", kind, detail.c_str());
  if (answer == nullptr) throw python_error();
  Py_DECREF(answer);
}

inline void host_waits(const std::string& why) { tell("synchronisation", why); }

inline std::function<void()> finish_collectives = [] {};  // nccl.h says how

// The sanitizer's callbacks, if it is on.
template <typename Callback>
void trace(Callback callback) {
  if (const c10::impl::PyInterpreter* interpreter = c10::impl::GPUTrace::get_trace()) callback(**interpreter);
}

inline uintptr_t as_number(void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

struct Event {
  uintptr_t number;
  std::chrono::steady_clock::time_point recorded_at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(num_devices); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  Device getDevice() const override { return Device(c10::kCUDA, current_device); }
  void setDevice(Device device) const override {
    check_index(index_of(device));
    current_device = index_of(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    setDevice(device);
    return before;
  }

  static c10::Stream stream(DeviceIndex index, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(c10::kCUDA, index), id);
  }
  c10::Stream getStream(Device device) const override {
    auto found = current_streams.find(index_of(device));
    return stream(index_of(device), found == current_streams.end() ? 0 : found->second);
  }
  c10::Stream getDefaultStream(Device device) const override { return stream(index_of(device), 0); }
  c10::Stream getNewStream(Device device, int) const override {
    const auto id = next_stream++;
    trace([&](auto& to) { to.trace_gpu_stream_creation(c10::kCUDA, id); });
    return stream(index_of(device), id);
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    c10::Stream before = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_waits("stream.synchronize");
    trace([&](auto& to) { to.trace_gpu_stream_synchronization(c10::kCUDA, stream.id()); });
  }
  void synchronizeDevice(const DeviceIndex) const override {
    host_waits("device.synchronize");
    finish_collectives();
    trace([](auto& to) { to.trace_gpu_device_synchronization(c10::kCUDA); });
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event{next_event++, {}};
      trace([&](auto& to) { to.trace_gpu_event_creation(c10::kCUDA, as_number(*event)); });
    }
    static_cast<Event*>(*event)->recorded_at = std::chrono::steady_clock::now();
    trace([&](auto& to) { to.trace_gpu_event_record(c10::kCUDA, as_number(*event), stream.id()); });
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) trace([&](auto& to) { to.trace_gpu_event_wait(c10::kCUDA, as_number(event), stream.id()); });
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    host_waits("event.synchronize");
    trace([&](auto& to) { to.trace_gpu_event_synchronization(c10::kCUDA, as_number(event)); });
  }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(
               static_cast<Event*>(end)->recorded_at - static_cast<Event*>(begin)->recorded_at)
        .count();
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace simulated

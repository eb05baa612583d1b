// A simulated CUDA device, with NCCL, inside a build of torch for CPUs: what Python sees of it.
#include "nccl.h"

namespace simulated {

void set_observer(const py::object& function) {
  is_observed = !function.is_none();
  Py_XDECREF(std::exchange(observer, function.is_none() ? nullptr : py::object(function).release().ptr()));
}

using GlooPtr = c10::intrusive_ptr<c10d::Backend>;

c10::intrusive_ptr<SimulatedNccl> make_nccl(
    GlooPtr gloo, std::string name, std::vector<int64_t> members, double timeout_s, bool is_eager,
    bool aborts_process) {
  const auto timeout = Milliseconds(static_cast<int64_t>(1000 * timeout_s));
  return c10::make_intrusive<SimulatedNccl>(
      std::move(gloo), SimulatedNccl::Settings{std::move(name), std::move(members), timeout, is_eager, aborts_process});
}

}  // namespace simulated

PYBIND11_MODULE(simulated_cuda, module) {
  using namespace simulated;
  finish_collectives = finish_all_work;
  module.def("install_hooks", &install_hooks);
  module.def("set_num_devices", [](int number) {
    TORCH_CHECK(number > 0 && number <= kMaxDevices, "A simulation has 1 to ", kMaxDevices, " devices.");
    num_devices = number;
  });
  module.def("num_devices", [] { return num_devices; });
  module.def("current_device", [] { return int(current_device); });
  module.def("set_device", [](int index) { Guard().setDevice(Device(c10::kCUDA, static_cast<DeviceIndex>(index))); });
  module.def("default_generators", [] {
    auto all = default_generators();
    all.resize(num_devices);
    return all;
  });
  module.def("allocated_bytes", [](int index) { return usage.at(index).allocated_bytes.load(); });
  module.def("peak_bytes", [](int index) { return usage.at(index).peak_bytes.load(); });
  module.def("total_bytes", [](int index) { return usage.at(index).total_bytes.load(); });
  module.def("limit_bytes", [](int index) { return usage.at(index).limit_bytes.load(); });
  module.def("reset_peak", [](int index) { usage.at(index).peak_bytes = usage.at(index).allocated_bytes.load(); });
  module.def("set_total_bytes", [](int index, int64_t total) {
    usage.at(index).total_bytes = total;
    usage.at(index).limit_bytes = total;
  });
  module.def("set_limit_bytes", [](int index, int64_t limit) { usage.at(index).limit_bytes = limit; });
  module.def("resize_storage", &resize_storage);
  module.def("set_observer", &set_observer);
  module.def("make_nccl", &make_nccl);
  module.def("split_by", [](const py::function& function) {
    auto* kept = new py::function(function);  // for good: Python is gone when static variables end
    SimulatedNccl::split_in_python = [kept](auto store, auto ranks, auto options) {
      py::gil_scoped_acquire gil;
      return (*kept)(store, ranks, options).template cast<c10::intrusive_ptr<SimulatedNccl>>();
    };
  });
  py::class_<SimulatedNccl, c10d::Backend, c10::intrusive_ptr<SimulatedNccl>>(module, "SimulatedNccl");
}

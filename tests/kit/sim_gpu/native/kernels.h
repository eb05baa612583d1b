// Every operator of the device: the CPU's kernel, on aliases of the device's tensors that carry their true addresses.
#pragma once
#include <ATen/Context.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <torch/library.h>

#include <set>
#include <vector>

#include "hooks.h"

namespace simulated {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

inline Tensor tensor_of(c10::Storage storage, DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
  if (like.is_conj()) made._set_conj(true);
  if (like.is_neg()) made._set_neg(true);
  return made;
}

inline c10::Storage storage_of(c10::DataPtr pointer, size_t num_bytes, c10::Allocator* allocator) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), num_bytes, std::move(pointer), allocator, true));
}

// The same memory as a CPU tensor; it does not keep that memory alive.
inline Tensor host_alias(const Tensor& device) {
  c10::DataPtr pointer(host_address(device.storage().data()), Device(c10::kCPU));
  auto storage = storage_of(std::move(pointer), device.storage().nbytes(), c10::GetAllocator(c10::kCPU));
  return tensor_of(std::move(storage), DispatchKey::CPU, device);
}

inline Tensor adopt(const Tensor& host, DeviceIndex index) {
  auto pointer = DeviceAllocator::adopt(host.storage(), index);
  return tensor_of(storage_of(std::move(pointer), host.storage().nbytes(), &device_allocator), DispatchKey::CUDA, host);
}

// ------------------------------------------------------------------------------------------- what differs from a CPU
// Operators that take indices from the host: they travel, and the host waits.
inline const std::set<std::string> takes_host_indices = {
    "aten::index.Tensor", "aten::_unsafe_index.Tensor", "aten::index.Tensor_out", "aten::index_put", "aten::index_put_",
    "aten::_index_put_impl_", "aten::_unsafe_index_put"};

// Operators whose result has a shape, or a value for the host, that only the device knows.
inline const std::set<std::string> host_needs_result = {
    "aten::nonzero",        "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::repeat_interleave.Tensor", "aten::equal",         "aten::bincount"};

// What torch.use_deterministic_algorithms refuses on CUDA (its documentation and `alertNotDeterministic` in ATen).
inline const std::set<std::string> nondeterministic = {
    "aten::nll_loss2d_forward",          "aten::cumsum",
    "aten::upsample_bilinear2d_backward", "aten::upsample_linear1d_backward",
    "aten::upsample_trilinear3d_backward", "aten::upsample_bicubic2d_backward",
    "aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward",
    "aten::adaptive_max_pool2d_backward", "aten::avg_pool3d_backward",
    "aten::max_pool3d_with_indices_backward", "aten::fractional_max_pool2d_backward",
    "aten::reflection_pad1d_backward",   "aten::reflection_pad2d_backward",
    "aten::replication_pad1d_backward",  "aten::replication_pad2d_backward",
    "aten::histc",                       "aten::bincount",
    "aten::kthvalue",                    "aten::median",
    "aten::grid_sampler_2d_backward",    "aten::_ctc_loss_backward",
    "aten::put_",                        "aten::multi_margin_loss"};

inline const std::set<std::string> uses_cublas = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot",
    "aten::mm.out", "aten::addmm.out", "aten::bmm.out", "aten::baddbmm.out"};

inline void check_deterministic(const std::string& name, const std::string& full_name) {
  if (nondeterministic.count(name)) tell("nondeterministic", full_name);
  if (!at::globalContext().deterministicAlgorithms()) return;
  if (nondeterministic.count(name)) at::globalContext().alertNotDeterministic(name);
  if (uses_cublas.count(full_name)) {
    const char* workspace = std::getenv("CUBLAS_WORKSPACE_CONFIG");
    TORCH_CHECK(
        workspace && (!std::strcmp(workspace, ":4096:8") || !std::strcmp(workspace, ":16:8")),
        "Deterministic behavior was enabled with torch.use_deterministic_algorithms(True), but this operation is not "
        "deterministic because it uses CuBLAS and CUBLAS_WORKSPACE_CONFIG is not set.");
  }
}

// ----------------------------------------------------------------------------------------------------- one call
inline std::mutex seeded_kernels;  // those that draw from the CPU's default generator

// One operator call: arguments become host aliases, the CPU's kernel runs, results become the device's.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(*stack), schema_(op.schema()) {
    name_ = schema_.overload_name().empty() ? schema_.name() : schema_.name() + "." + schema_.overload_name();
  }

  void run() {
    first_ = stack_.size() - schema_.arguments().size();
    if (!is_view()) tell("launch", name_);
    check_deterministic(schema_.name(), name_);
    for (size_t i = 0; i < schema_.arguments().size(); i++) replace(stack_[first_ + i], schema_.arguments()[i].name());
    if (device_ < 0) device_ = current_device;
    check_host_arguments();
    if (host_needs_result.count(name_)) host_waits(name_);
    const bool draws = give_generator() || !op_.hasTag(at::Tag::nondeterministic_seeded);
    draws ? compute() : compute_seeded();
    take_over_resized();
    const size_t first_result = stack_.size() - schema_.returns().size();
    for (size_t i = first_result; i < stack_.size(); i++) give_back(stack_[i]);
  }

 private:
  bool is_view() const {
    for (const auto& result : schema_.returns())
      if (result.alias_info() && !result.alias_info()->isWrite()) return true;
    return false;
  }

  void replace(IValue& value, const std::string& argument) {
    if (value.isTensor()) {
      value = on_host(value.toTensor(), argument);
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors = value.toTensorVector();
      for (Tensor& tensor : tensors) tensor = on_host(tensor, argument);
      value = IValue(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList().vec()) {
        if (tensor && tensor->defined() && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte))
          has_mask_ = true;
        tensors.push_back(tensor ? std::optional<Tensor>(on_host(*tensor, argument)) : tensor);
      }
      value = IValue(tensors);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (device_ < 0) device_ = index_of(value.toDevice());
      value = IValue(Device(c10::kCPU));
    }
  }

  Tensor on_host(const Tensor& tensor, const std::string& argument) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (tensor.dim() > 0) host_argument_ = argument;
      return tensor;
    }
    TORCH_CHECK(
        device_ < 0 || tensor.get_device() == device_,
        "Expected all tensors to be on the same device, but found at least two devices, cuda:", int(device_),
        " and cuda:", int(tensor.get_device()), "! (when checking argument ", argument, " in method ", name_, ")");
    device_ = tensor.get_device();
    for (const auto& [device, host] : aliases_)
      if (device.is_same(tensor)) return host;
    aliases_.emplace_back(tensor, host_alias(tensor));
    return aliases_.back().second;
  }

  void check_host_arguments() const {
    const bool takes_indices = takes_host_indices.count(name_) > 0;
    if (takes_indices && has_mask_) host_waits(name_ + " with a mask");
    if (host_argument_.empty()) return;
    TORCH_CHECK(
        takes_indices, "Expected all tensors to be on the same device, but got ", host_argument_,
        " is on cpu, different from other tensors on cuda:", int(device_), " (when checking argument in method ",
        name_, ")");
    tell("host_to_device", "pageable");
    host_waits(name_ + " with an index in host memory");
  }

  // Whether the operator has an argument for a generator: it then gets one of the CPU's.
  bool give_generator() {
    bool is_given = false;
    for (size_t i = 0; i < schema_.arguments().size(); i++) {
      IValue& value = stack_[first_ + i];
      if (schema_.arguments()[i].type()->str().find("Generator") == std::string::npos) continue;
      is_given = true;
      at::Generator generator = value.isNone() ? default_generators()[device_] : value.toGenerator();
      TORCH_CHECK(
          generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
          generator.device().type(), "'");
      value = IValue(simulated_generator(generator).next());
    }
    return is_given;
  }

  void compute() {
    c10::impl::ExcludeDispatchKeyGuard not_here(DispatchKeySet(c10::BackendComponent::CUDABit));
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack_);
  }

  void compute_seeded() {
    std::lock_guard<std::mutex> hold(seeded_kernels);
    auto of_host = at::detail::getDefaultCPUGenerator();
    auto state = of_host.get_state();
    of_host.set_current_seed(simulated_generator(default_generators()[device_]).next().current_seed());
    compute();
    of_host.set_state(state);
  }

  // What the kernel has resized, or given other memory.
  void take_over_resized() {
    for (auto& [device, host] : aliases_) {
      auto* impl = device.unsafeGetTensorImpl();
      const bool has_moved = host.storage().data() != host_address(device.storage().data());
      if (has_moved) {
        impl->set_storage_keep_dtype(adopt(host, device_).storage());
        impl->set_storage_offset(host.storage_offset());
      }
      if (has_moved || device.sizes() != host.sizes() || device.strides() != host.strides())
        impl->set_sizes_and_strides(host.sizes(), host.strides());
    }
  }

  void give_back(IValue& value) {
    if (value.isTensor()) {
      value = on_device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> tensors = value.toTensorVector();
      for (Tensor& tensor : tensors) tensor = on_device(tensor);
      value = IValue(tensors);
    }
  }

  Tensor on_device(const Tensor& result) const {
    if (!result.defined() || !result.is_cpu()) return result;
    for (const auto& [device, host] : aliases_)
      if (host.is_same(result)) return device;
    if (const void* memory = result.storage().data())
      for (const auto& [device, host] : aliases_)
        if (host.storage().data() == memory) return tensor_of(device.storage(), DispatchKey::CUDA, result);
    return adopt(result, device_);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const c10::FunctionSchema& schema_;
  std::string name_;
  size_t first_ = 0;
  DeviceIndex device_ = -1;
  bool has_mask_ = false;
  std::string host_argument_;
  std::vector<std::pair<Tensor, Tensor>> aliases_;  // (device, host)
};

inline void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// ------------------------------------------------------------------------------------- what is more than a kernel
using OptionalDtype = std::optional<at::ScalarType>;
using OptionalLayout = std::optional<at::Layout>;
using OptionalDevice = std::optional<Device>;

struct OnDevice {  // allocations go there for as long as it lives
  explicit OnDevice(const OptionalDevice& device) : before(current_device) {
    if (device) Guard().setDevice(*device);
  }
  ~OnDevice() { current_device = before; }
  DeviceIndex before;
};

inline Tensor empty(
    c10::IntArrayRef size, OptionalDtype dtype, OptionalLayout, OptionalDevice device, std::optional<bool> pin,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice guard(device);
  return at::detail::empty_generic(
      size, &device_allocator, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

inline Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, OptionalDtype dtype, OptionalLayout, OptionalDevice device,
    std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

inline void tell_of_copy(const char* kind, const Tensor& on_host, bool non_blocking) {
  if (on_host.numel() == 0) return;
  const bool is_pinned = PinnedAllocator::is_pinned(on_host.storage().data());
  tell(kind, is_pinned ? "pinned" : "pageable");
  if (!is_pinned || !non_blocking) host_waits(std::string(kind) + (is_pinned ? " copy" : " copy of pageable memory"));
}

inline Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  tell("launch", "aten::copy_");
  if (source.is_cpu()) tell_of_copy("host_to_device", source, non_blocking);
  else if (self.is_cpu()) tell_of_copy("device_to_host", self, non_blocking);
  else if (self.get_device() != source.get_device()) tell("device_to_device", "");
  Tensor to = self.is_cuda() ? host_alias(self) : self;
  Tensor from = source.is_cuda() ? host_alias(source) : source;
  c10::impl::ExcludeDispatchKeyGuard not_here(DispatchKeySet(c10::BackendComponent::CUDABit));
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  to.copy_(from);
  return self;
}

inline at::Scalar item(const Tensor& self) {
  host_waits("aten::_local_scalar_dense");
  return at::_local_scalar_dense(host_alias(self));
}

inline void become(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size() && (stride.data() != nullptr || size.empty())) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
}

inline Tensor& set_part(
    Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  become(self, std::move(source), offset, size, stride);
  return self;
}

inline Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.itemsize());
  become(self, std::move(source), 0, {length}, {1});
  return self;
}

inline Tensor& set_tensor(Tensor& self, const Tensor& source) {
  become(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
  return self;
}

inline Tensor& set_nothing(Tensor& self) {
  become(self, empty({0}, self.scalar_type(), {}, self.device(), {}, {}).storage(), 0, {0}, {1});
  return self;
}

inline const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve)
    impl->empty_tensor_restride(*format);
  const size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

inline bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().data() == other.storage().data() && self.storage_offset() == other.storage_offset() &&
      self.sizes() == other.sizes() && self.strides() == other.strides();
}

inline void record_stream(Tensor&, c10::Stream stream) { tell("record_stream", std::to_string(stream.id())); }

inline int64_t fused_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>,
    bool) {
  return 0;  // sdp::SDPBackend::math: attention as plain operators
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", item);
  library.impl("set_.source_Storage_storage_offset", set_part);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("resize_", resize_);
  library.impl("is_set_to", is_set_to);
  library.impl("record_stream", record_stream);
  library.impl("_fused_sdp_choice", fused_attention);
  // Torch would choose a backend by device itself, and stop at one it does not know.
  library.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  library.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace simulated

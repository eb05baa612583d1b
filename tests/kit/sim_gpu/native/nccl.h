// NCCL's rules over a group of Gloo's.
//
// A communicator has one queue a worker; nothing is buffered, so a send ends when the other side has received; tags
// count for nothing. A collective reads what the tensors hold when it is launched and writes its result when it is
// waited for. In between, results hold a pattern (NaN for floating point numbers), and who changes a tensor that is in
// flight gets an error by the time it is waited for. Before each collective the workers compare what they are about to
// do and how far each has come with its other communicators. A peer that dies is noticed by nobody until the timeout.
// Work of an aborted communicator ends without an error, as its kernels do, and leaves whatever numbers it had.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <condition_variable>
#include <deque>
#include <thread>

#include "kernels.h"

namespace simulated {

using c10d::OpType;
using c10d::Work;
using Milliseconds = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<Tensor>;

inline Tensor flat_host(const Tensor& device) {  // in the order of memory
  return host_alias(device).as_strided({device.numel()}, {1}, device.storage_offset());
}

inline bool same_bytes(const Tensor& left, const Tensor& right) {
  return left.numel() == 0 || std::memcmp(left.data_ptr(), right.data_ptr(), left.nbytes()) == 0;
}

// What a program does that NCCL would answer by a hang or by wrong numbers.
struct BrokenRule : std::runtime_error {
  template <typename... Text>
  static void check(bool holds, const Text&... text) {
    if (!holds) throw BrokenRule(c10::str(text...));
  }
  using std::runtime_error::runtime_error;
};

// A tensor in flight: its device memory, and what the collective reads or writes in its place.
struct Operand {
  Tensor device, host;

  static Operand input(const Tensor& tensor) { return {tensor, flat_host(tensor).clone()}; }
  static Operand output(const Tensor& tensor) {
    auto memory = flat_host(tensor);
    Operand operand{tensor, memory.clone()};
    std::memset(memory.data_ptr(), pattern(tensor), memory.nbytes());
    return operand;
  }
  static int pattern(const Tensor& tensor) { return tensor.scalar_type() == at::kBool ? 1 : 0xFF; }

  bool is_unchanged() const { return same_bytes(flat_host(device), host); }
  bool holds_pattern() const {
    auto memory = flat_host(device);
    const auto* bytes = static_cast<const unsigned char*>(memory.data_ptr());
    return std::all_of(bytes, bytes + memory.nbytes(), [&](unsigned char byte) { return byte == pattern(device); });
  }
  void write() const { flat_host(device).copy_(host); }
};

struct Operation {
  OpType type;
  std::string name;
  std::vector<Operand> inputs, outputs;
  // Begins, and returns what waits for the end.
  std::function<std::function<void()>(Operation&)> begin;
  int peer = -1;
};

class SimulatedNccl;

class NcclWork final : public c10d::Work {
 public:
  NcclWork(int rank, std::vector<Operation> operations, Clock::time_point deadline)
      : Work(rank, operations.empty() ? OpType::BARRIER : operations.front().type),
        operations_(std::move(operations)), deadline_(deadline) {
    std::vector<Device> devices;
    for (auto& operation : operations_)
      for (auto& output : operation.outputs) {
        results_.push_back(output.device);
        if (devices.empty()) devices.push_back(output.device.device());
      }
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
  }

  // All of a group begin before any is waited for; what is received is acknowledged before acknowledgements are awaited.
  void run() {
    std::deque<std::function<void()>> ends;
    for (auto& operation : operations_) {
      auto end = operation.begin(operation);
      operation.type == OpType::RECV ? ends.push_front(end) : ends.push_back(end);
    }
    for (auto& end : ends) end();
  }

  void finish(std::exception_ptr error, bool is_aborted = false) {
    {
      std::lock_guard<std::mutex> hold(lock_);
      if (is_done_) return;
      is_done_ = true;
      is_aborted_ = is_aborted;
      error_ = error;
    }
    changed_.notify_all();
    if (has_future_) finish_future();
  }

  bool isCompleted() override {
    std::lock_guard<std::mutex> hold(lock_);
    return is_done_;
  }
  bool isSuccess() const override { return is_done_ && !error_; }
  std::exception_ptr exception() const override { return error_; }
  Tensors result() override { return results_; }
  void synchronize() override { wait(::kNoTimeout); }
  void blockCurrentStream() override { wait(::kNoTimeout); }
  Clock::time_point deadline() const { return deadline_; }
  std::string name() const { return operations_.empty() ? "coalesced" : operations_.front().name; }

  bool wait(Milliseconds) override {
    if (PyGILState_Check()) {
      py::gil_scoped_release release;
      await();
    } else {
      await();
    }
    if (error_) std::rethrow_exception(error_);
    write_results();
    return true;
  }

  // A synchronisation of the device says nothing of what has failed.
  void finish_with_device() {
    await();
    if (!error_) write_results();
  }

  // Whether nothing is left to do; of work that nobody waits for, the result is written then.
  bool is_over(bool has_holder) {
    if (!isCompleted()) return false;
    if (!has_holder) finish_with_device();
    return error_ || is_written_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    has_future_ = true;
    if (isCompleted()) finish_future();
    return future_;
  }

 private:
  void await() {
    std::unique_lock<std::mutex> hold(lock_);
    changed_.wait(hold, [&] { return is_done_; });
  }

  void write_results() {
    std::lock_guard<std::mutex> hold(writing_);
    if (is_written_) return;
    is_written_ = true;
    for (auto& operation : operations_) {
      for (auto& output : operation.outputs)
        BrokenRule::check(
            output.holds_pattern(), "NCCL ", operation.name, ": its result was written to while it was in flight.");
      for (auto& output : operation.outputs) output.write();
      for (auto& input : operation.inputs)
        BrokenRule::check(
            overlaps_output(operation, input) || input.is_unchanged(), "NCCL ", operation.name,
            ": its input was changed while it was in flight.");
    }
    if (!is_aborted_) operations_.clear();  // else Gloo may still be at work on them
  }

  static bool overlaps_output(const Operation& operation, const Operand& input) {
    return std::any_of(operation.outputs.begin(), operation.outputs.end(), [&](const Operand& output) {
      return output.device.storage().data() == input.device.storage().data();
    });
  }

  void finish_future() {
    try {
      if (error_) std::rethrow_exception(error_);
      write_results();
      future_->markCompleted(IValue(results_));
    } catch (...) {
      future_->setErrorIfNeeded(std::current_exception());
    }
  }

  std::vector<Operation> operations_;
  Clock::time_point deadline_;
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::mutex lock_, writing_;
  std::condition_variable changed_;
  std::atomic<bool> has_future_{false};
  bool is_done_ = false, is_aborted_ = false, is_written_ = false;
  std::exception_ptr error_;
};

using WorkPtr = c10::intrusive_ptr<NcclWork>;

// Work whose results are not written yet, held by somebody or not; a synchronisation of the device writes them too. Never
// destroyed: at the end of the process, tensors would be freed after Python.
inline std::mutex in_flight_lock;
inline auto& in_flight = *new std::vector<WorkPtr>;

inline void finish_all_work() {
  std::vector<WorkPtr> all;
  {
    std::lock_guard<std::mutex> hold(in_flight_lock);
    all.swap(in_flight);
  }
  for (auto& work : all) work->finish_with_device();
}

// ------------------------------------------------------------------------------------------- order of communicators
// How many collectives this worker has launched in each of its communicators, and between whom these are.
struct Launches {
  std::mutex lock;
  struct Communicator {
    std::vector<int64_t> members;
    int64_t count = 0;
  };
  std::map<int64_t, Communicator> by_name;  // by the hash of the group's name
};
inline Launches launches;

constexpr int64_t kMaxCompared = 24;

// What is compared before a collective: what it is, and for each other communicator of ours how far it has come.
inline Tensor describe(int64_t communicator, const Operation& operation) {
  auto text = std::to_string(static_cast<int>(operation.type));
  const auto& sized = operation.outputs.empty() ? operation.inputs : operation.outputs;
  if (!sized.empty()) text += c10::str(" ", sized[0].device.numel(), sized[0].device.scalar_type());
  auto row = Tensor(at::detail::empty_cpu({1 + 2 * kMaxCompared}, at::kLong)).zero_();
  auto* numbers = static_cast<int64_t*>(row.data_ptr());
  numbers[0] = static_cast<int64_t>(std::hash<std::string>{}(text));
  int64_t at = 1;
  for (const auto& [name, other] : launches.by_name) {
    if (name == communicator || at + 1 >= row.numel()) continue;
    numbers[at] = name, numbers[at + 1] = other.count;
    at += 2;
  }
  return row;
}

inline void check_alike(const Tensors& rows, const std::vector<int64_t>& members, const std::string& name) {
  auto number = [&](size_t rank, int64_t at) { return static_cast<const int64_t*>(rows[rank].data_ptr())[at]; };
  std::map<int64_t, std::pair<size_t, int64_t>> seen;
  for (size_t rank = 0; rank < rows.size(); rank++) {
    BrokenRule::check(
        number(rank, 0) == number(0, 0), "NCCL ", name, ": ranks ", members[0], " and ", members[rank],
        " of one communicator launch different collectives, where NCCL would hang or return wrong numbers.");
    for (int64_t at = 1; at + 1 < rows[rank].numel() && number(rank, at) != 0; at += 2) {
      auto [first, is_new] = seen.try_emplace(number(rank, at), rank, number(rank, at + 1));
      BrokenRule::check(
          is_new || first->second.second == number(rank, at + 1), "NCCL ", name, ": ranks ",
          members[first->second.first], " and ", members[rank],
          " use two communicators in different orders, which dead-locks on GPUs.");
    }
  }
}

// ------------------------------------------------------------------------------------------------- the communicator
class SimulatedNccl final : public c10d::Backend {
 public:
  struct Settings {
    std::string name;
    std::vector<int64_t> members;  // global ranks
    Milliseconds timeout;
    bool is_eager;  // one queue for everything; else one for each pair of workers that send and receive
    bool aborts_process;  // what the watchdog does after a timeout
  };

  SimulatedNccl(c10::intrusive_ptr<c10d::Backend> gloo, Settings settings)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), settings_(std::move(settings)),
        number_(static_cast<int64_t>(std::hash<std::string>{}(settings_.name))) {
    std::lock_guard<std::mutex> hold(launches.lock);
    launches.by_name[number_].members = settings_.members;
  }
  ~SimulatedNccl() override { shutdown(); }

  const std::string getBackendName() const override { return "nccl"; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  void eagerConnectSingleDevice(Device) override { settings_.is_eager = true; }
  void setTimeout(Milliseconds timeout) override { settings_.timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }

  c10::intrusive_ptr<Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options) override {
    return split_in_python(store, ranks, options);
  }
  inline static std::function<c10::intrusive_ptr<Backend>(
      c10::intrusive_ptr<c10d::Store>, std::vector<int>, c10::intrusive_ptr<Options>)>
      split_in_python;

  // Pending work ends, later work fails; nobody hears of it elsewhere.
  void abort() override { stop(kAborted); }
  void shutdown() override {
    stop("NCCL communicator was destroyed.");
    std::lock_guard<std::mutex> hold(launches.lock);
    launches.by_name.erase(number_);
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return launch(reduction("all_reduce", OpType::ALLREDUCE, tensors[0], options.reduceOp));
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Operation> all;
    for (auto& tensor : tensors) all.push_back(reduction("all_reduce", OpType::ALLREDUCE, tensor, options.reduceOp));
    return launch(std::move(all));
  }
  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return launch(collective("broadcast", OpType::BROADCAST, {}, tensors, [=, this](Operation& operation) {
      Tensors values{operation.outputs[0].host};
      auto on_gloo = options;
      on_gloo.asyncOp = true;
      gloo_->broadcast(values, on_gloo)->wait();
    }));
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return launch(collective("reduce", OpType::REDUCE, tensors, tensors, [=, this](Operation& operation) {
      sum(operation.inputs[0].host.clone(), options.reduceOp, [&](const Tensor& total) {
        if (rank_ == options.rootRank) operation.outputs[0].host.copy_(total);
      });
    }));
  }
  c10::intrusive_ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    return launch(collective("all_gather", OpType::ALLGATHER, inputs, outputs[0], [this](Operation& operation) {
      std::vector<Tensors> values{{}};
      for (auto& output : operation.outputs) values[0].push_back(output.host);
      gather_all(values, operation.inputs[0].host);
    }));
  }
  c10::intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions&) override {
    return launch(gather_flat(output, input));
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    std::vector<Operation> all;
    for (size_t i = 0; i < outputs.size(); i++) all.push_back(gather_flat(outputs[i], inputs[i]));
    return launch(std::move(all));
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return launch(scatter_sum(output, {input}, options.reduceOp));
  }
  c10::intrusive_ptr<Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    return launch(scatter_sum(outputs[0], inputs[0], options.reduceOp));
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Operation> all;
    for (size_t i = 0; i < outputs.size(); i++) all.push_back(scatter_sum(outputs[i], {inputs[i]}, options.reduceOp));
    return launch(std::move(all));
  }
  c10::intrusive_ptr<Work> alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_rows, std::vector<int64_t>& input_rows,
      const c10d::AllToAllOptions& options) override {
    return launch(collective(
        "all_to_all", OpType::ALLTOALL_BASE, {input}, {output},
        [=, this, to = output_rows, from = input_rows](Operation& operation) mutable {
          auto received = operation.outputs[0].host.view(output.sizes());
          auto sent = operation.inputs[0].host.view(input.sizes());
          auto on_gloo = options;
          on_gloo.asyncOp = true;
          gloo_->alltoall_base(received, sent, to, from, on_gloo)->wait();
        }));
  }
  c10::intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return launch(collective("all_to_all", OpType::ALLTOALL, inputs, outputs, [=, this](Operation& operation) {
      std::vector<c10::intrusive_ptr<Work>> sent;
      for (int peer = 0; peer < size_; peer++) {
        Tensors value{operation.inputs[peer].host};
        if (peer != rank_) sent.push_back(gloo_->send(value, peer, kPeerTag));
        else operation.outputs[peer].host.copy_(value[0]);
      }
      for (int peer = 0; peer < size_; peer++) {
        Tensors value{operation.outputs[peer].host};
        if (peer != rank_) gloo_->recv(value, peer, kPeerTag)->wait();
      }
      for (auto& work : sent) work->wait();
    }));
  }
  c10::intrusive_ptr<Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const auto received = outputs.empty() ? Tensors{} : outputs[0];
    return launch(collective("gather", OpType::GATHER, inputs, received, [=, this](Operation& operation) {
      std::vector<Tensors> values{{}};
      for (int rank = 0; rank < size_; rank++) values[0].push_back(operation.inputs[0].host.clone());
      gather_all(values, operation.inputs[0].host);
      for (size_t rank = 0; rank < operation.outputs.size(); rank++)
        operation.outputs[rank].host.copy_(values[0][rank]);
    }));
  }
  c10::intrusive_ptr<Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const auto sent = inputs.empty() ? Tensors{} : inputs[0];
    return launch(collective("scatter", OpType::SCATTER, sent, outputs, [=, this](Operation& operation) {
      std::vector<Tensors> values;
      if (!sent.empty()) values.emplace_back();
      for (auto& input : operation.inputs) values[0].push_back(input.host);
      Tensors received{operation.outputs[0].host};
      auto on_gloo = options;
      on_gloo.asyncOp = true;
      gloo_->scatter(received, values, on_gloo)->wait();
    }));
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& options) override {
    host_waits("barrier");
    return launch(collective("barrier", OpType::BARRIER, {}, {}, [](Operation&) {}));  // comparing is meeting
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int peer, int) override {
    Operation operation{OpType::SEND, "send", {Operand::input(checked(tensors[0]))}, {}, {}, peer};
    operation.begin = [this, peer](Operation& self) -> std::function<void()> {
      Tensors value{self.inputs[0].host}, receipt{one_byte()};
      auto sent = gloo_->send(value, peer, 0);
      auto received = gloo_->recv(receipt, peer, 1);
      return [=] { sent->wait(), received->wait(), (void)value, (void)receipt; };
    };
    return launch(std::move(operation));
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int peer, int) override {
    Operation operation{OpType::RECV, "recv", {}, {Operand::output(checked(tensors[0]))}, {}, peer};
    operation.begin = [this, peer](Operation& self) -> std::function<void()> {
      Tensors value{self.outputs[0].host};
      auto received = gloo_->recv(value, peer, 0);
      return [=, this] {
        received->wait();
        Tensors receipt{one_byte()};
        gloo_->send(receipt, peer, 1)->wait();
      };
    };
    return launch(std::move(operation));
  }

  void startCoalescing() override { is_coalescing_ = true; }
  c10::intrusive_ptr<Work> endCoalescing() override {
    is_coalescing_ = false;
    return launch(std::exchange(coalesced_, {}));
  }

 private:
  static constexpr int kPeerTag = 2;
  static constexpr auto kAborted = "NCCL communicator was aborted.";

  static Tensor one_byte() { return Tensor(at::detail::empty_cpu({1}, at::kByte)).zero_(); }

  // -------------------------------------------------------------------------------------------------- operations
  static const Tensor& checked(const Tensor& tensor) {
    TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type ", tensor.device().type());
    TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
    const auto dtype = tensor.scalar_type();
    TORCH_CHECK(
        dtype != at::kShort && dtype != at::kUInt16 && dtype != at::kUInt32 && dtype != at::kUInt64,
        "Unconvertible NCCL type ", dtype);
    return tensor;
  }

  template <typename Run>
  Operation collective(const char* name, OpType type, const Tensors& inputs, const Tensors& outputs, Run run) {
    Operation operation{type, name, {}, {}, {}, -1};
    for (auto& input : inputs) operation.inputs.push_back(Operand::input(checked(input)));
    for (auto& output : outputs) operation.outputs.push_back(Operand::output(checked(output)));
    Tensor row;
    {
      std::lock_guard<std::mutex> hold(launches.lock);
      launches.by_name[number_].count++;
      row = describe(number_, operation);
    }
    operation.begin = [this, run, row](Operation& self) mutable -> std::function<void()> {
      std::vector<Tensors> rows{{}};
      for (int rank = 0; rank < size_; rank++) rows[0].push_back(row.clone());
      gather_all(rows, row);
      check_alike(rows[0], settings_.members, self.name);
      run(self);
      return [] {};
    };
    return operation;
  }

  void gather_all(std::vector<Tensors>& outputs, const Tensor& input) {
    Tensors inputs{input};
    c10d::AllgatherOptions options;
    options.asyncOp = true;
    gloo_->allgather(outputs, inputs, options)->wait();
  }

  template <typename Take>
  void sum(Tensor value, c10d::ReduceOp op, Take take) {
    const bool is_mean = op == c10d::ReduceOp::AVG;
    c10d::AllreduceOptions options;
    options.reduceOp = is_mean ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
    options.asyncOp = true;
    Tensors values{value};
    gloo_->allreduce(values, options)->wait();
    if (is_mean) value.div_(size_);
    take(value);
  }

  Operation reduction(const char* name, OpType type, const Tensor& tensor, c10d::ReduceOp op) {
    return collective(name, type, {}, {tensor}, [=, this](Operation& operation) {
      sum(operation.outputs[0].host, op, [](const Tensor&) {});
    });
  }

  Operation gather_flat(const Tensor& output, const Tensor& input) {
    return collective("all_gather", OpType::_ALLGATHER_BASE, {input}, {output}, [this](Operation& operation) {
      std::vector<Tensors> values{{}};
      const auto length = operation.inputs[0].host.numel();
      for (int rank = 0; rank < size_; rank++)
        values[0].push_back(operation.outputs[0].host.narrow(0, rank * length, length));
      gather_all(values, operation.inputs[0].host);
    });
  }

  Operation scatter_sum(const Tensor& output, const Tensors& inputs, c10d::ReduceOp op) {
    return collective("reduce_scatter", OpType::_REDUCE_SCATTER_BASE, inputs, {output}, [=, this](Operation& operation) {
      auto& mine = operation.outputs[0].host;
      auto whole = mine.new_empty({mine.numel() * size_});
      int64_t at = 0;
      for (auto& input : operation.inputs) {
        whole.narrow(0, at, input.host.numel()).copy_(input.host);
        at += input.host.numel();
      }
      sum(whole, op, [&](const Tensor& total) { mine.copy_(total.narrow(0, rank_ * mine.numel(), mine.numel())); });
    });
  }

  // ------------------------------------------------------------------------------------------------------- queues
  struct Queue {
    std::mutex lock;
    std::condition_variable changed;
    std::deque<WorkPtr> waiting;
    std::vector<WorkPtr> launched;  // and not done
    std::string stopped;  // why, once it is
  };

  c10::intrusive_ptr<Work> launch(Operation operation) {
    std::vector<Operation> one;
    one.push_back(std::move(operation));
    return launch(std::move(one));
  }

  c10::intrusive_ptr<Work> launch(std::vector<Operation> operations) {
    if (is_coalescing_) {
      for (auto& operation : operations) coalesced_.push_back(std::move(operation));
      return c10::make_intrusive<NcclWork>(rank_, std::vector<Operation>{}, Clock::now());
    }
    for (auto& operation : operations) tell("nccl", operation.name);
    sequence_++;
    auto& queue = queue_of(operations);
    auto work = c10::make_intrusive<NcclWork>(rank_, std::move(operations), Clock::now() + settings_.timeout);
    {
      std::lock_guard<std::mutex> hold(queue->lock);
      TORCH_CHECK_WITH(DistBackendError, queue->stopped.empty(), queue->stopped);
      queue->waiting.push_back(work);
      queue->launched.push_back(work);
    }
    {
      std::lock_guard<std::mutex> hold(in_flight_lock);
      in_flight.erase(
          std::remove_if(
              in_flight.begin(), in_flight.end(), [](auto& one) { return one->is_over(one.use_count() > 1); }),
          in_flight.end());
      in_flight.emplace_back(work);
    }
    queue->changed.notify_all();
    return work;
  }

  std::shared_ptr<Queue>& queue_of(const std::vector<Operation>& operations) {
    const int peer = settings_.is_eager || operations.size() != 1 ? -1 : operations[0].peer;
    std::lock_guard<std::mutex> hold(queues_lock_);
    auto& queue = queues_[peer];
    if (!queue) {
      queue = std::make_shared<Queue>();
      std::thread(&SimulatedNccl::serve, this, queue).detach();
    }
    return queue;
  }

  // The thread of a queue. It outlives an aborted communicator where Gloo still waits for a peer.
  void serve(std::shared_ptr<Queue> queue) {
    auto keep = c10::intrusive_ptr<SimulatedNccl>::reclaim_copy(this);
    while (true) {
      WorkPtr work;
      {
        std::unique_lock<std::mutex> hold(queue->lock);
        queue->changed.wait(hold, [&] { return !queue->stopped.empty() || !queue->waiting.empty(); });
        if (!queue->stopped.empty()) return;
        work = queue->waiting.front();
        queue->waiting.pop_front();
      }
      std::exception_ptr error;
      try {
        work->run();
      } catch (const BrokenRule&) {
        error = std::current_exception();
      } catch (...) {
        fail_all(*queue, time_out(*queue, *work));
        return;
      }
      {
        std::lock_guard<std::mutex> hold(queue->lock);
        auto& all = queue->launched;
        all.erase(std::remove(all.begin(), all.end(), work), all.end());
      }
      work->finish(error);
    }
  }

  // Gloo has noticed that a peer is gone or late. NCCL would not: the work hangs until the watchdog ends it.
  std::string time_out(Queue& queue, NcclWork& work) {
    std::unique_lock<std::mutex> hold(queue.lock);
    queue.changed.wait_until(hold, work.deadline(), [&] { return !queue.stopped.empty(); });
    if (!queue.stopped.empty()) return queue.stopped;
    const auto text = c10::str(
        "[Rank ", rank_, "] Watchdog caught collective operation timeout: WorkNCCL(OpType=", work.name(),
        ", Timeout(ms)=", settings_.timeout.count(), ") ran for longer than its timeout.");
    if (settings_.aborts_process) {
      std::fprintf(stderr, "%s To avoid data inconsistency, we are taking the entire process down.\n", text.c_str());
      std::abort();
    }
    return text;
  }

  static void fail_all(Queue& queue, const std::string& why) {
    std::vector<WorkPtr> pending;
    {
      std::lock_guard<std::mutex> hold(queue.lock);
      if (queue.stopped.empty()) queue.stopped = why;
      pending = std::exchange(queue.launched, {});
    }
    queue.changed.notify_all();
    const bool is_aborted = why == kAborted;
    std::exception_ptr error;
    if (!is_aborted) error = std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, why));
    for (auto& work : pending) work->finish(error, is_aborted);
  }

  void stop(const std::string& why) {
    std::map<int, std::shared_ptr<Queue>> queues;
    {
      std::lock_guard<std::mutex> hold(queues_lock_);
      queues = queues_;
    }
    for (auto& [peer, queue] : queues) fail_all(*queue, why);
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
  Settings settings_;
  int64_t number_;
  std::atomic<uint64_t> sequence_{0};
  bool is_coalescing_ = false;
  std::vector<Operation> coalesced_;
  std::mutex queues_lock_;
  std::map<int, std::shared_ptr<Queue>> queues_;
};

// What DDP's reducer times its steps by.
class ReducerTimer final : public c10d::Timer {
 public:
  explicit ReducerTimer(Device) {}
  std::optional<int64_t> measureDifference(Event begin, Event end) override {
    const auto from = getTimestamp(begin), to = getTimestamp(end);
    if (!from || !to || *to < *from) return std::nullopt;
    return *to - *from;
  }
};

}  // namespace simulated

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, simulated::ReducerTimer)
}

// LibTorch's operators on a played device: every operator that has a CUDA kernel is computed by the CPU's
// kernel on the same memory, as work of the current stream. The meta kernel computes the shapes of results
// beforehand. If an operator has no meta kernel, or has results that are not tensors, the program waits for
// the stream; on a real device, operators of this kind (nonzero, unique, equal) wait, too.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/copy_native.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/library.h>

#include <cstdio>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#include "device/runtime/call_description.h"
#include "device/runtime/played_cuda.h"

namespace reef::played {
namespace {

using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// These operators keep their own kernels: they make tensors, return views, or only query what the host knows.
const std::set<std::string> kLeftAsTheyAre = {
    "aten::empty.memory_format", "aten::empty_strided",        "aten::resize_",
    "aten::_local_scalar_dense", "aten::record_stream",        "aten::set_",
    "aten::set_.source_Storage", "aten::set_.source_Tensor",   "aten::set_.source_Storage_storage_offset",
    "aten::is_set_to",           "aten::_efficientzerotensor", "aten::_fused_sdp_choice"};

at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (!tensor.is_cuda())  // The program may change a CPU tensor before the work runs.
    return tensor.device().is_cpu() ? tensor.clone() : tensor;
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_conj() && !tensor.is_neg(),
              "a played device has neither sparse tensors nor conjugate views");
  return at::for_blob(reach(tensor.const_data_ptr()), tensor.sizes())
      .strides(tensor.strides())
      .options(tensor.options().device(at::kCPU))
      .make_tensor();
}
at::Tensor on_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}
at::Tensor on_cuda(const at::Tensor& shaped, c10::Device device) {
  if (!shaped.defined()) return shaped;
  return at::detail::empty_strided_cuda(shaped.sizes(), shaped.strides(), shaped.scalar_type(), device);
}

template <class Convert>
IValue converted(const IValue& value, const Convert& convert, c10::DeviceType type) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> all;
    for (const at::Tensor& each : value.toTensorVector()) all.push_back(convert(each));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> all;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector())
      all.push_back(each ? std::optional(convert(*each)) : each);
    return all;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(type);
  return value;
}
template <class Convert>
Stack converted(const Stack& values, const Convert& convert, c10::DeviceType type) {
  Stack all;
  for (const IValue& value : values) all.push_back(converted(value, convert, type));
  return all;
}

template <class Each>
void each_tensor(const IValue& value, const Each& each) {
  if (value.isTensor()) each(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) each(tensor);
  if (value.isOptionalTensorList())
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor) each(*tensor);
}

c10::Device device_of(const Stack& given) {
  std::optional<c10::Device> found;
  for (const IValue& value : given)
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!found && tensor.defined() && tensor.is_cuda()) found = tensor.device();
    });
  return found.value_or(c10::Device(at::kCUDA, c10::cuda::current_device()));
}

// Returns a generator for one operator. Advances the device's generator as a kernel would, in program order.
at::Generator drawn(std::optional<at::Generator> given, c10::Device device) {
  auto* const generator = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      given, at::cuda::detail::getDefaultCUDAGenerator(device.index()));
  const std::lock_guard lock(generator->mutex_);
  const auto [seed, offset] = generator->philox_engine_inputs(4);
  return at::detail::createCPUGenerator(seed * 0x9E3779B97F4A7C15ULL + offset);
}

void give_generator(const OperatorHandle& op, Stack& given, c10::Device device) {
  const auto& arguments = op.schema().arguments();
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "generator") continue;
    given[i] = drawn(given[i].isNone() ? std::nullopt : std::optional(given[i].toGenerator()), device);
  }
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}
bool gives_views(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
  return false;
}

struct ComputeQuietly {
  at::AutoDispatchBelowADInplaceOrView below;
  at::NoGradGuard no_grad;
  at::DisableRecordFunctionGuard unobserved;
};

void copy_results(const Stack& from, const Stack& to) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (to[i].isTensor() && to[i].toTensor().defined()) to[i].toTensor().copy_(from[i].toTensor());
    if (!to[i].isTensorList()) continue;
    const auto read = from[i].toTensorVector();
    const auto written = to[i].toTensorVector();
    for (std::size_t k = 0; k < written.size(); ++k) written[k].copy_(read[k]);
  }
}

bool are_tensors(const Stack& values) {
  for (const IValue& value : values)
    if (!value.isTensor() && !value.isTensorList()) return false;
  return true;
}

std::optional<Stack> computed_shapes(const OperatorHandle& op, const Stack& given) {
  if (!op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) return {};
  try {
    const at::DisableRecordFunctionGuard unobserved;
    Stack metas = converted(given, on_meta, at::kMeta);
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::Meta), &metas);
    if (!are_tensors(metas)) return {};
    return metas;
  } catch (const std::exception&) {
    return {};  // If the arguments are wrong, the CPU's kernel reports the error.
  }
}

// Remembers the shapes of results, because many meta kernels are written in Python and take longer than the
// operator.
std::optional<Stack> shapes(const OperatorHandle& op, const Stack& given) {
  static std::mutex mutex;
  static auto* const known = new std::unordered_map<std::string, std::optional<Stack>>;
  const std::optional<std::string> call = description_of(op, given);
  if (!call) return computed_shapes(op, given);
  {
    const std::lock_guard lock(mutex);
    if (const auto found = known->find(*call); found != known->end()) return found->second;
  }
  std::optional<Stack> shaped = computed_shapes(op, given);  // Not under the lock: it may wait for Python's.
  const std::lock_guard lock(mutex);
  return known->emplace(*call, std::move(shaped)).first->second;
}

Stack given_back(const c10::FunctionSchema& schema, const Stack& given) {
  Stack results;
  for (const auto& result : schema.returns()) {
    for (std::size_t i = 0; i < given.size(); ++i) {
      const auto* const alias = schema.arguments()[i].alias_info();
      if (!writes(schema.arguments()[i]) || result.alias_info() == nullptr ||
          !(*alias == *result.alias_info()))
        continue;
      results.push_back(given[i]);
      break;
    }
  }
  return results;
}

// Waits for the stream's earlier work, then computes in tensors of the host.
void compute_at_once(const OperatorHandle& op, Stack& values, cudaStream_t stream) {
  std::exception_ptr failure;
  enqueue(stream, Work::kKernel, [&] {
    const ComputeQuietly quietly;
    try {
      op.callBoxed(&values);
    } catch (...) {
      failure = std::current_exception();
    }
  });
  finish(stream);
  if (failure) std::rethrow_exception(failure);
}

// Computes into new tensors, for operators whose meta kernel, which would tell the shapes, is written in
// Python.
Stack results_beside(const OperatorHandle& op, const Stack& given, cudaStream_t stream) {
  Stack values = converted(given, on_cpu, at::kCPU);
  for (std::size_t i = 0; i < given.size(); ++i) {
    const auto& argument = op.schema().arguments()[i];
    TORCH_CHECK(!writes(argument) || (argument.is_out() && given[i].isTensor()),
                "a played device cannot tell which shapes ", op.operator_name(), " gives");
    if (argument.is_out()) values[i] = at::empty({0}, given[i].toTensor().options().device(at::kCPU));
  }
  Stack shaped = values;
  compute_at_once(op, values, stream);
  return shaped;
}

// Resizes out= arguments to the shapes that the operator computes.
void resize_results(const OperatorHandle& op, const Stack& given, cudaStream_t stream) {
  bool has_out = false;
  for (const auto& argument : op.schema().arguments()) has_out |= argument.is_out();
  if (!has_out || !op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) return;
  Stack metas = converted(given, on_meta, at::kMeta);
  Stack shaped = metas;
  try {
    const at::DisableRecordFunctionGuard unobserved;
    op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::Meta), &metas);
  } catch (const c10::NotImplementedError&) {
    shaped = results_beside(op, given, stream);
  }
  for (std::size_t i = 0; i < given.size(); ++i) {
    if (!op.schema().arguments()[i].is_out() || !given[i].isTensor()) continue;
    const at::Tensor out = given[i].toTensor();
    if (out.sizes() != shaped[i].toTensor().sizes()) out.resize_(shaped[i].toTensor().sizes());
  }
}

void compute(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const auto count = static_cast<std::ptrdiff_t>(schema.arguments().size());
  Stack given(stack->end() - count, stack->end());
  stack->erase(stack->end() - count, stack->end());
  const c10::Device device = device_of(given);
  const c10::cuda::CUDAGuard guard(device);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream(device.index()).stream();
  give_generator(op, given, device);
  bool in_place = false;
  for (const auto& argument : schema.arguments()) in_place |= writes(argument);

  Stack results;
  if (in_place) {
    resize_results(op, given, stream);
    results = given_back(schema, given);
    enqueue(stream, Work::kKernel, [op, cpu = converted(given, on_cpu, at::kCPU)] {
      const ComputeQuietly quietly;
      Stack values = cpu;
      op.callBoxed(&values);
    });
  } else if (const auto shaped = shapes(op, given)) {
    results = converted(
        *shaped, [&](const at::Tensor& each) { return on_cuda(each, device); }, at::kCUDA);
    enqueue(stream, Work::kKernel,
            [op, cpu = converted(given, on_cpu, at::kCPU), to = converted(results, on_cpu, at::kCPU)] {
              const ComputeQuietly quietly;
              Stack values = cpu;
              op.callBoxed(&values);
              copy_results(values, to);
            });
  } else {
    Stack values = converted(given, on_cpu, at::kCPU);
    compute_at_once(op, values, stream);
    results = converted(
        values, [&](const at::Tensor& each) { return on_cuda(each, device); }, at::kCUDA);
    enqueue(stream, Work::kKernel, [values, to = converted(results, on_cpu, at::kCPU)] {
      const ComputeQuietly quietly;
      copy_results(values, to);
    });
  }
  stack->insert(stack->end(), results.begin(), results.end());
}

// LibTorch uses the runtime to copy between devices, and between a device and the host. This function does
// the copies for which it would use a kernel (other dtypes, other strides).
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  const bool by_kernel = to.is_cuda() && from.is_cuda() && to.device() == from.device() &&
                         (to.scalar_type() != from.scalar_type() || !to.is_non_overlapping_and_dense() ||
                          to.strides() != from.strides() || to.sizes() != from.sizes());
  if (!by_kernel) return at::native::copy_(to, from, non_blocking);
  const c10::cuda::CUDAGuard guard(to.device());
  enqueue(c10::cuda::getCurrentCUDAStream(to.device().index()).stream(), Work::kKernel,
          [written = on_cpu(to), read = on_cpu(from.expand_as(to))] {
            const ComputeQuietly quietly;
            at::Tensor{written}.copy_(read);
          });
  return to;
}

// The CPU's operator has no argument for a generator, so dropout is computed here.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const c10::cuda::CUDAGuard guard(input.device());
  const bool drops = train.value_or(true) && p > 0;
  at::Tensor output = on_cuda(input, input.device());
  at::Tensor mask = at::detail::empty_strided_cuda(input.sizes(), input.strides(), at::kBool, input.device());
  const double scale = p == 1 ? 0 : 1 / (1 - p);
  enqueue(c10::cuda::getCurrentCUDAStream(input.device().index()).stream(), Work::kKernel,
          [drops, p, scale, read = on_cpu(input), written = on_cpu(output), kept = on_cpu(mask),
           generator = drawn(std::nullopt, input.device())] {
            const ComputeQuietly quietly;
            if (!drops) {
              at::Tensor{kept}.fill_(true);
              at::Tensor{written}.copy_(read);
              return;
            }
            at::Tensor{kept}.bernoulli_(1 - p, generator);
            at::Tensor{written}.copy_(at::mul(at::mul(read, kept), scale));
          });
  return {output, mask};
}

// Replaces the kernel of every operator that has one for CUDA.
struct Registration {
  Registration() : library(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__) {
    const c10::WarningUtils::WarningHandlerGuard silent(&quiet);  // No warnings about replaced kernels.
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const std::string text = c10::toString(name);
      const auto op = dispatcher.findSchema(name);
      if (!text.starts_with("aten::") || kLeftAsTheyAre.contains(text) || !op) continue;
      if (text == "aten::native_dropout") continue;
      if (!op->hasKernelForDispatchKey(DispatchKey::CUDA) || gives_views(op->schema())) continue;
      library.impl(text.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&compute>());
    }
    library.impl("copy_", &copy);
    library.impl("native_dropout", &dropout);
    at::globalContext().setUserEnabledCuDNN(false);
    at::globalContext().setSDPUseFlash(false);
    at::globalContext().setSDPUseMemEfficient(false);
    at::globalContext().setSDPUseCuDNN(false);
  }
  struct Quiet : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } quiet;
  torch::Library library;
};
const Registration registration;

}  // namespace
}  // namespace reef::played

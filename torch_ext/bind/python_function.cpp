#include "python_function.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <atomic>

namespace reef::bind {
namespace {

/// Python is going, or gone.
std::atomic<bool> python_has_ended{false};

template <class Signature>
auto operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

struct PythonFunction::Handle {
  explicit Handle(std::int64_t given) : number(given) {}
  ~Handle() {
    if (python_has_ended.load()) return;
    try {
      static const auto forget = operator_of<void(std::int64_t)>("reef::forget_function");
      forget.call(number);
    } catch (const std::exception&) {
      // It stays in Python's table: some bytes.
    }
  }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  std::int64_t number;
};

PythonFunction::PythonFunction(std::int64_t number) : handle_(std::make_shared<Handle>(number)) {}

std::vector<at::Tensor> PythonFunction::operator()(const std::vector<at::Tensor>& tensors) const {
  static const auto call =
      operator_of<std::vector<at::Tensor>(std::int64_t, at::TensorList)>("reef::call_function");
  return call.call(handle_->number, tensors);
}

}  // namespace reef::bind

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def("call_function(int number, Tensor[] tensors) -> Tensor[]");
  m.def("forget_function(int number) -> ()");
  m.def("python_ends() -> ()", [] { reef::bind::python_has_ended.store(true); });
}

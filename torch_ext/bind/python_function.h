#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

namespace reef::bind {

/// A callable of Python's, known here by a number: reef/_function.py has the callables, and the kernels of
/// the two operators through which it is called and forgotten. Copies share it.
class PythonFunction {
 public:
  explicit PythonFunction(std::int64_t number);
  std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& tensors) const;

 private:
  struct Handle;
  std::shared_ptr<Handle> handle_;
};

}  // namespace reef::bind

#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "table_at_fork.h"

namespace reef {

/// Parameters of which the whole process knows something, a Note, for as long as this object lives. It does
/// not keep the parameters alive: its owner does. A parameter has one note of each kind.
template <class Note>
class NotedParameters {
 public:
  NotedParameters() = default;
  ~NotedParameters() {
    const auto all = notes().lock();
    for (const c10::TensorImpl* const parameter : parameters_) all->erase(parameter);
  }
  NotedParameters(const NotedParameters&) = delete;
  NotedParameters& operator=(const NotedParameters&) = delete;

  void add(const at::Tensor& parameter, Note note = {}) {
    parameters_.push_back(parameter.unsafeGetTensorImpl());
    notes().lock()->insert_or_assign(parameters_.back(), std::move(note));
  }
  /// Returns the note of a parameter, whoever has added it.
  static std::optional<Note> find(const at::Tensor& parameter) {
    const auto all = notes().lock();
    const auto found = all->find(parameter.unsafeGetTensorImpl());
    return found == all->end() ? std::nullopt : std::optional<Note>(found->second);
  }

 private:
  using Notes = std::unordered_map<const c10::TensorImpl*, Note>;
  static TableAtFork<Notes>& notes() {
    static auto* const all = new TableAtFork<Notes>;
    return *all;
  }

  std::vector<const c10::TensorImpl*> parameters_;
};

}  // namespace reef

#include "reef/error.h"

#include <utility>

namespace reef {
namespace {

c10::SourceLocation here(const char* function) { return {function, "reef", 0}; }

}  // namespace

ConfigError::ConfigError(const std::string& message) : c10::ValueError(here("ConfigError"), message) {}

FileError::FileError(const std::string& message, std::string path, int error_number)
    : c10::Error(here("FileError"), message), path_(std::move(path)), error_number_(error_number) {}

BudgetError::BudgetError(const std::string& message, std::uint64_t smallest_budget_bytes)
    : c10::OutOfMemoryError(here("BudgetError"), message), smallest_budget_bytes_(smallest_budget_bytes) {}

NonFiniteGradient::NonFiniteGradient(const std::string& message)
    : c10::Error(here("NonFiniteGradient"), message) {}

RecomputeError::RecomputeError(const std::string& message) : c10::Error(here("RecomputeError"), message) {}

ProcessGroupError::ProcessGroupError(const std::string& message, int rank)
    : c10::DistError(here("ProcessGroupError"), message), rank_(rank) {}

PassAbandoned::PassAbandoned(const std::string& message, int rank)
    : c10::DistError(here("PassAbandoned"), message), rank_(rank) {}

RanksOutOfStep::RanksOutOfStep(const std::string& message)
    : c10::DistError(here("RanksOutOfStep"), message) {}

RankFailed::RankFailed(const std::string& message, int failed_rank)
    : c10::DistBackendError(here("RankFailed"), message), failed_rank_(failed_rank) {}

std::string message_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  std::string text = ours != nullptr ? ours->what_without_backtrace() : error.what();
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.pop_back();
  return text;
}

}  // namespace reef

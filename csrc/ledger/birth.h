#pragma once

#include <cstdint>
#include <string>

#include "reef/category.h"

namespace reef {

/// Under what circumstances this thread is allocating. Written by the observer (observe.cpp) and
/// CategoryScope, read when a block is born. Plain data, so that a thread's first allocation runs no
/// constructor.
struct Birth {
  static constexpr std::uint8_t kNoScope = 0xFF;

  const std::string* op = nullptr;       ///< the outermost operator running, named for reports
  Category category = Category::kOther;  ///< that it gives to its blocks
  std::uint8_t scope = kNoScope;         ///< the innermost CategoryScope's category
};

Birth& this_threads_birth();

/// The category of a block born now on this thread.
Category birth_category();

}  // namespace reef

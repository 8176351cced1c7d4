// What tests of groups and messages share. Every rank computes by itself what the others hold.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <dirent.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "reef/collectives.h"
#include "reef/error.h"
#include "reef/process_group.h"
#include "support/config_error.h"

namespace reef::messages {

using test::config_error;

/// One group for the whole program.
inline const ProcessGroupPtr& world() {
  static const ProcessGroupPtr the_group = init_process_group();
  return the_group;
}
inline int rank() { return world()->getRank(); }
inline int size() { return world()->getSize(); }

/// Bytes that every rank can work out; of another `seed` others.
inline at::Tensor bytes_of_seed(std::int64_t seed, std::int64_t count) {
  return ((at::arange(count, at::kLong) * 31 + seed * 17) % 251).to(at::kByte);
}

/// Bits of a seed: any bits are a value of any dtype but bool.
inline at::Tensor value(std::int64_t seed, at::IntArrayRef sizes, at::ScalarType dtype) {
  const std::int64_t count = c10::multiply_integers(sizes);
  if (dtype == at::kBool) return (bytes_of_seed(seed, count) % 2).to(at::kBool).reshape(sizes);
  const at::Tensor bytes = bytes_of_seed(seed, count * static_cast<std::int64_t>(c10::elementSize(dtype)));
  at::Tensor tensor = at::empty(sizes, dtype);
  if (count > 0) std::memcpy(tensor.mutable_data_ptr(), bytes.const_data_ptr(), tensor.nbytes());
  return tensor;
}

/// Bit for bit, with dtype and shape.
inline bool same(const at::Tensor& left, const at::Tensor& right) {
  if (left.scalar_type() != right.scalar_type() || left.sizes() != right.sizes()) return false;
  const at::Tensor a = left.detach().resolve_conj().resolve_neg().contiguous();
  const at::Tensor b = right.detach().resolve_conj().resolve_neg().contiguous();
  return a.numel() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

inline void expect_words(const std::string& text, const std::vector<std::string>& words) {
  for (const auto& word : words)
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' in: " << text;
}

inline std::ptrdiff_t entries(const char* folder) {
  DIR* const open = ::opendir(folder);
  std::ptrdiff_t count = 0;
  while (::readdir(open) != nullptr) ++count;
  ::closedir(open);
  return count;
}

struct Held {
  std::ptrdiff_t threads = entries("/proc/self/task");
  std::ptrdiff_t descriptors = entries("/proc/self/fd");

  /// Threads and sockets that are ending may take a while.
  static bool becomes_at_most(const Held& before) {
    for (int look = 0; look < 600; ++look) {
      const Held now;
      if (now.threads <= before.threads && now.descriptors <= before.descriptors) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
    const Held now;
    ADD_FAILURE() << now.threads << " threads and " << now.descriptors << " descriptors, before "
                  << before.threads << " and " << before.descriptors;
    return false;
  }
};

}  // namespace reef::messages

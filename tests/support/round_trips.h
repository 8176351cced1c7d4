#pragma once

#include <cstddef>
#include <random>
#include <thread>
#include <vector>

#include "reef/tier.h"

namespace reef::test {

using Bytes = std::vector<unsigned char>;

inline Bytes random_bytes(std::mt19937_64& random, std::size_t count) {
  Bytes bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

/// Threads that each write pages of random lengths and read them back, all at once. `judge` is called for
/// each page with a function that makes the trip: true if what was read is what was written; it throws what
/// the tier throws.
template <class Judge>
void round_trips(Tier& tier, unsigned threads, int rows, const Judge& judge) {
  std::vector<std::thread> running;
  for (unsigned seed = 0; seed < threads; ++seed) {
    running.emplace_back([&, seed] {
      std::mt19937_64 random(seed);
      for (int row = 0; row < rows; ++row) {
        const Bytes bytes = random_bytes(random, 1 + random() % 50000);
        const auto slot = tier.take(bytes.size());
        judge([&] {
          Bytes back(bytes.size());
          tier.write(*slot, bytes.data());
          tier.read(*slot, back.data());
          return back == bytes;
        });
        tier.give_back(*slot);
      }
    });
  }
  for (std::thread& thread : running) thread.join();
}

}  // namespace reef::test

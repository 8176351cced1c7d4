// Runs CUDA kernels as ordinary functions on the CPU: such a device is called a played device. Every CUDA
// thread of a block is a fiber. All fibers run on the operating system's thread that launches the kernel, in
// random order, and switch where CUDA threads synchronize or exchange values.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>

namespace reef::played {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
/// The built-in variables of CUDA, as the running fiber sees them.
inline Index thread_index, block_index, grid_size, block_size;

inline constexpr unsigned kWarpThreads = 32;

/// Is thrown if a kernel does something that CUDA leaves undefined, so that a device may compute wrong
/// numbers or hang: threads of one group call different collectives, or wait for threads that never call
/// them, or a block uses scratch memory again without a barrier.
class UndefinedBehavior : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Seeds the random order of blocks and threads.
void seed(std::uint64_t with);

/// Runs `kernel` for each thread of each block. Blocks run one after another in random order, and so do the
/// threads of a block between two collectives. Throws UndefinedBehavior.
void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& kernel);

/// The collectives of a group of threads: all of its threads must call the same one.
enum class Exchange : std::uint8_t { kBarrier, kAny, kBallot, kReduce };

/// Waits until every thread of the block has called this.
void meet_block(Exchange in = Exchange::kBarrier);
/// Waits until every thread of this thread's tile has called this. A tile has `size` threads, a power of two
/// up to kWarpThreads.
void meet_tile(unsigned size, Exchange in);
/// Checks that this thread has passed a barrier of the whole block since it last used this scratch memory,
/// which is noted in `scratch_used`, an element for each thread of the block.
void use_scratch(std::uint64_t* scratch_used);
/// Returns an array with an element for each thread of this thread's warp.
std::uint64_t* warp_slots();

/// Combines the values of a tile's threads, in the order of the threads.
template <class Combine>
std::uint64_t exchange_in_tile(unsigned size, Exchange in, std::uint64_t mine, const Combine& combine) {
  const unsigned self = thread_index.x % kWarpThreads, first = self / size * size;
  std::uint64_t* const slots = warp_slots();
  slots[self] = mine;
  meet_tile(size, in);
  std::uint64_t all = slots[first];
  for (unsigned i = 1; i < size; ++i) all = combine(all, slots[first + i]);
  meet_tile(size, in);  // All threads have read the slots.
  return all;
}

}  // namespace reef::played

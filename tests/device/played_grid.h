// Kernels of CUDA as ordinary functions: every thread of a block is a fiber, all fibers run on the one thread
// of the operating system that launches, in random order, and threads exchange values where CUDA lets them.
#pragma once

#include <cstdint>
#include <functional>
#include <stdexcept>

namespace reef::played {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
/// Those of the fiber that runs.
inline Index thread_index, block_index, grid_size, block_size;

inline constexpr unsigned kWarpThreads = 32;

/// What CUDA leaves undefined, and a device may answer with wrong numbers or by hanging: threads of one group
/// that wait for each other in different exchanges, or for threads that never come; scratch memory that is
/// used again at once.
class UndefinedBehavior : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

/// Orders of blocks and threads follow from it.
void seed(std::uint64_t with);

/// Runs `kernel` for each thread of each block. Blocks run one after another, in random order; between two
/// exchanges, so do the threads of a block. Throws UndefinedBehavior.
void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& kernel);

/// The exchanges between threads of one group: what meets must be the same.
enum class Exchange : std::uint8_t { kBarrier, kAny, kBallot, kReduce };

/// Waits until every thread of the block has come here.
void meet_block(Exchange in = Exchange::kBarrier);
/// Waits for the threads of the tile of `size` threads (a power of two up to a warp's) to which this one
/// belongs.
void meet_tile(unsigned size, Exchange in);
/// Remembers in `scratch_used`, one for each thread of the block, that this thread uses scratch memory, as
/// CUB wants it: a second time only behind a barrier of the whole block.
void use_scratch(std::uint64_t* scratch_used);
/// A place for each thread of this one's warp.
std::uint64_t* warp_slots();

/// What `combine` makes of the values of a tile's threads, in their order.
template <class Combine>
std::uint64_t exchange_in_tile(unsigned size, Exchange in, std::uint64_t mine, const Combine& combine) {
  const unsigned self = thread_index.x % kWarpThreads, first = self / size * size;
  std::uint64_t* const slots = warp_slots();
  slots[self] = mine;
  meet_tile(size, in);
  std::uint64_t all = slots[first];
  for (unsigned i = 1; i < size; ++i) all = combine(all, slots[first + i]);
  meet_tile(size, in);  // all have read
  return all;
}

}  // namespace reef::played

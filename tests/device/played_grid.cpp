#include "device/played_grid.h"

#include <ucontext.h>
#include <csetjmp>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace reef::played {
namespace {

constexpr std::size_t kStackBytes = 128 << 10;

// A point at which the threads of a group wait for each other.
struct Meeting {
  unsigned arrived = 0;
  std::uint64_t held = 0;  // How many times all threads have arrived.
  Exchange in = Exchange::kBarrier;
};

struct Fiber {
  bool is_over = false;
  const Meeting* waits_for = nullptr;
  std::uint64_t since = 0;

  bool waits() const { return waits_for != nullptr && waits_for->held == since; }
};

// Runs the fiber of one thread of a block, and then that of the same thread of the next block: to make a
// context takes longer than many kernels.
struct Worker {
  std::unique_ptr<char[]> stack;
  std::jmp_buf place;  // Where it goes on; only once it has begun.
  bool has_begun = false;
};
std::vector<Worker>& workers() {
  thread_local std::vector<Worker> all;
  return all;
}

std::mt19937_64 random_order;
std::uint64_t barriers = 0;  // Counts barriers of whole blocks and starts of blocks in this process.

// Runs the fibers of one block. If the kernel does something undefined, the fibers are abandoned in the
// middle, so no variable of a kernel may need its destructor.
class Block {
 public:
  Block(unsigned number, unsigned threads, const std::function<void()>& kernel)
      : number_(number),
        kernel_(kernel),
        fibers_(threads),
        workers_(workers()),
        slots_((threads + kWarpThreads - 1) / kWarpThreads * kWarpThreads) {
    if (workers_.size() < threads) workers_.resize(threads);
  }

  void run() {
    std::vector<unsigned> turns(fibers_.size());
    std::iota(turns.begin(), turns.end(), 0U);
    for (bool runs = true; runs;) {
      std::shuffle(turns.begin(), turns.end(), random_order);
      runs = false;
      bool moved = false;
      for (const unsigned thread : turns) {
        Fiber& fiber = fibers_[thread];
        if (fiber.is_over) continue;
        runs = true;
        if (fiber.waits()) continue;
        moved = true;
        go_on(thread);
        if (!wrong_.empty()) abandon(wrong_);
      }
      if (runs && !moved) abandon("block " + std::to_string(number_) + " hangs: " + waiting());
    }
  }

  void meet(Meeting& meeting, unsigned threads, Exchange in) {
    if (meeting.arrived == 0) meeting.in = in;
    if (meeting.in != in) fail("threads of one group are in different exchanges");
    if (++meeting.arrived == threads) {
      meeting.arrived = 0;
      ++meeting.held;
      if (&meeting == &whole_ && in == Exchange::kBarrier) ++barriers;
      return;
    }
    Fiber& self = fibers_[running_];
    self.waits_for = &meeting;
    self.since = meeting.held;
    leave();
    self.waits_for = nullptr;
  }
  void use_scratch(std::uint64_t& used) {
    if (used == barriers) fail("scratch memory is used again without a barrier");
    used = barriers;
  }
  Meeting& of_block() { return whole_; }
  Meeting& of_tile(unsigned size) {
    std::vector<Meeting>& tiles = tiles_[size];
    if (tiles.empty()) tiles.resize(slots_.size() / size);
    return tiles[running_ / size];
  }
  std::uint64_t* slots_of_warp() { return &slots_[running_ / kWarpThreads * kWarpThreads]; }
  unsigned threads() const { return static_cast<unsigned>(fibers_.size()); }

 private:
  std::string waiting() const {
    const auto count =
        std::count_if(fibers_.begin(), fibers_.end(), [](const Fiber& each) { return !each.is_over; });
    return std::to_string(count) + " threads wait for others that never come";
  }

  void go_on(unsigned thread) {
    running_ = thread;
    thread_index = {thread};
    block_index = {number_};
    if (_setjmp(scheduler_) != 0) return;
    Worker& worker = workers_[thread];
    if (worker.has_begun) _longjmp(worker.place, 1);
    worker.has_begun = true;
    if (!worker.stack) worker.stack.reset(new char[kStackBytes]);
    ucontext_t begin;
    getcontext(&begin);
    begin.uc_stack.ss_sp = worker.stack.get();
    begin.uc_stack.ss_size = kStackBytes;
    begin.uc_link = nullptr;
    makecontext(&begin, &work, 0);
    setcontext(&begin);
  }
  // Makes run() throw, and does not return to this fiber.
  void fail(const std::string& what) {
    wrong_ = "block " + std::to_string(number_) + ", thread " + std::to_string(running_) + ": " + what;
    leave();
  }
  // Throws what is wrong. Workers begin anew with the next block, because they are in the middle of this one.
  [[noreturn]] void abandon(const std::string& what) {
    for (Worker& worker : workers_) worker.has_begun = false;
    throw UndefinedBehavior(what);
  }
  static void work();
  // Switches to the scheduler, and returns when the scheduler resumes this worker, maybe for another block.
  static void leave();

  unsigned number_;
  const std::function<void()>& kernel_;
  std::vector<Fiber> fibers_;
  std::vector<Worker>& workers_;
  std::vector<std::uint64_t> slots_;
  Meeting whole_;
  std::array<std::vector<Meeting>, kWarpThreads + 1> tiles_;  // By their size.
  std::jmp_buf scheduler_;
  unsigned running_ = 0;
  std::string wrong_;
};

Block* now = nullptr;

void Block::leave() {
  if (_setjmp(now->workers_[now->running_].place) == 0) _longjmp(now->scheduler_, 1);
}

void Block::work() {
  for (;;) {
    now->kernel_();
    now->fibers_[now->running_].is_over = true;
    leave();
  }
}

}  // namespace

void seed(std::uint64_t with) { random_order.seed(with); }

void run_grid(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  std::vector<unsigned> order(blocks);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), random_order);
  grid_size = {blocks, 1, 1};
  block_size = {threads, 1, 1};
  for (const unsigned number : order) {
    Block block(number, threads, kernel);
    now = &block;
    ++barriers;
    block.run();
  }
  now = nullptr;
}

void meet_block(Exchange in) { now->meet(now->of_block(), now->threads(), in); }
void meet_tile(unsigned size, Exchange in) { now->meet(now->of_tile(size), size, in); }
void use_scratch(std::uint64_t* scratch_used) { now->use_scratch(scratch_used[thread_index.x]); }
std::uint64_t* warp_slots() { return now->slots_of_warp(); }

}  // namespace reef::played

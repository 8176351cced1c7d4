// The learner against programs made at random: whatever a step does with its pages, it is known from the
// second time on, and what is said of the next use is what the program then does.
#include "swap/step_learner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace reef {
namespace {

constexpr int kRows = 5'000;
constexpr std::size_t kAll = 1'000;

const std::string& op_name(std::size_t i) {
  static const auto* const kNames = new std::vector<std::string>{"mm", "add", "relu", "mul", "sum", "conv"};
  return (*kNames)[i % kNames->size()];
}

// Pages 0 to persistent - 1 outlive every step; others are made by an operator, and die after one or live on
// into the next step.
struct Op {
  std::size_t name;
  std::vector<int> uses;
  std::vector<int> makes;
  std::vector<int> deaths;
};
struct Program {
  int persistent = 0;
  int pages = 0;
  std::vector<Op> ops;
  std::vector<int> survivors;
  std::size_t survivors_die_after = 0;  ///< of the next step
};

Program any_program(std::mt19937& random) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  Program program;
  program.persistent = program.pages = 1 + below(4);
  std::vector<int> alive;
  for (int page = 0; page < program.pages; ++page) alive.push_back(page);
  const int count = 1 + below(12);
  for (int i = 0; i < count; ++i) {
    Op op{static_cast<std::size_t>(below(6)), {}, {}, {}};
    for (int uses = below(3) + (i == 0); uses > 0; --uses) {
      const int page = i == 0 ? 0 : alive[static_cast<std::size_t>(below(static_cast<int>(alive.size())))];
      op.uses.push_back(page);  // the same page twice at times
    }
    for (int makes = below(3); makes > 0; --makes) {
      op.makes.push_back(program.pages);
      alive.push_back(program.pages++);
    }
    for (std::size_t a = alive.size(); a-- > 0;) {
      if (alive[a] < program.persistent || below(3) > 0) continue;
      op.deaths.push_back(alive[a]);
      alive.erase(alive.begin() + static_cast<std::ptrdiff_t>(a));
    }
    program.ops.push_back(op);
  }
  for (const int page : alive) {
    if (page >= program.persistent) program.survivors.push_back(page);
  }
  program.survivors_die_after = static_cast<std::size_t>(below(count));
  return program;
}

class Machine {
 public:
  explicit Machine(int persistent) {
    for (int page = 0; page < persistent; ++page) pages_[page] = made(page, false);
  }

  StepLearner learner;

  /// Operators before `known` are expected to be known ones.
  void run(const Program& program, std::size_t known, bool next_known = true) {
    std::map<int, LearnedPagePtr> carried;
    for (const int page : carried_) carried[page] = std::move(pages_[page]);
    for (std::size_t i = 0; i < program.ops.size(); ++i) {
      one(program, i, i < known, i < known && next_known);
      if (i != std::min(carried_dies_after_, program.ops.size() - 1)) continue;
      for (auto& [key, page] : carried) learner.died(*page);
      carried.clear();
    }
    carried_ = program.survivors;
    carried_dies_after_ = program.survivors_die_after;
  }

  static std::uint64_t bytes_of(int page) { return 1000 + static_cast<std::uint64_t>(page) * 7; }

 private:
  LearnedPagePtr made(int page, bool in_step) {
    const LearnedPagePtr made(new LearnedPage);
    made->bytes = bytes_of(page);
    if (in_step) learner.made(*made);
    return made;
  }

  void one(const Program& program, std::size_t i, bool known, bool next_known) {
    const Op& op = program.ops[i];
    std::vector<StepLearner::Use> uses;
    for (const int page : op.uses) uses.push_back({pages_.at(page).get(), page % 2 == 0});
    const std::size_t position = learner.begin_operator(op_name(op.name), uses);
    EXPECT_EQ(position, i);
    std::vector<LearnedPage*> results;
    for (const int page : op.makes) {
      pages_[page] = made(page, true);
      results.push_back(pages_[page].get());
    }
    learner.end_operator(position, uses, results, 0.5, 3);
    EXPECT_EQ(learner.following(), known) << "operator " << i;
    if (next_known) {
      for (const int page : op.uses) expect_next(program, i, page);
      for (const int page : op.makes) expect_next(program, i, page);
    }
    for (const int page : op.deaths) {
      learner.died(*pages_.at(page));
      pages_.erase(page);
    }
  }

  // By looking ahead in the program.
  void expect_next(const Program& program, std::size_t i, int page) {
    const auto uses = [&](std::size_t op) {
      const std::vector<int>& all = program.ops[op].uses;
      return std::find(all.begin(), all.end(), page) != all.end();
    };
    const std::size_t count = program.ops.size();
    std::uint64_t ahead = kNeverUsed;
    for (std::size_t step = 1; step <= count && ahead == kNeverUsed; ++step) {
      if (i + step >= count && page >= program.persistent) break;
      if (uses((i + step) % count)) ahead = step;
    }
    const LearnedPage& known = *pages_.at(page);
    if (ahead == kNeverUsed) {
      EXPECT_EQ(known.next_use, kNeverUsed);
    } else {
      EXPECT_EQ(known.next_use, first_of_step_ + i + ahead);
    }
  }

 public:
  bool end_step(const Program& program) {
    first_of_step_ += program.ops.size();
    return learner.end_step();
  }

 private:
  std::map<int, LearnedPagePtr> pages_;
  std::vector<int> carried_;
  std::size_t carried_dies_after_ = 0;
  std::uint64_t first_of_step_ = 0;
};

TEST(StepLearner, KnowsEveryStepFromItsSecondTimeOn) {
  std::mt19937 random(1);
  for (int row = 0; row < kRows; ++row) {
    const Program program = any_program(random);
    Machine machine(program.persistent);
    for (int step = 0; step < 4; ++step) {
      machine.run(program, step > 0 ? kAll : 0);
      EXPECT_EQ(machine.end_step(program), step == 0);
    }
    const Trace& trace = machine.learner.trace();
    check(trace);
    ASSERT_EQ(trace.operators.size(), program.ops.size());
    for (const TraceOperator& op : trace.operators) {
      EXPECT_EQ(op.seconds, 0.5);
      EXPECT_EQ(op.scratch_bytes, 3);
    }
    ASSERT_FALSE(testing::Test::HasFailure()) << "row " << row;
  }
}

// The program with one change, and the operator at which it is noticed.
std::pair<Program, std::size_t> changed(Program program, std::mt19937& random) {
  const std::size_t at = random() % program.ops.size();
  Op& op = program.ops[at];
  switch (random() % 4) {
    case 0:  // another operator
      op.name += 1;
      return {program, at};
    case 1:  // one more at the end
      program.ops.push_back({0, {0}, {}, {}});
      return {program, program.ops.size() - 1};
    case 2:  // one fewer page made; none to be made: one more
      if (op.makes.empty() || std::find(program.survivors.begin(), program.survivors.end(), op.makes[0]) ==
                                  program.survivors.end()) {
        op.makes.push_back(program.pages);
        program.survivors.push_back(program.pages++);
        return {program, at};
      }
      [[fallthrough]];
    default: {  // a batch of another size: its pages are others from here on
      if (op.makes.empty()) return {program, kAll};
      const int page = op.makes[0];
      const auto replace = [&](std::vector<int>& pages) {
        std::replace(pages.begin(), pages.end(), page, program.pages);
      };
      for (Op& other : program.ops) {
        replace(other.uses);
        replace(other.makes);
        replace(other.deaths);
      }
      replace(program.survivors);
      ++program.pages;
      return {program, at};
    }
  }
}

TEST(StepLearner, LearnsAnewWhereAStepDeparts) {
  std::mt19937 random(2);
  int departed = 0;
  for (int row = 0; row < kRows; ++row) {
    const Program before = any_program(random);
    const auto [after, at] = changed(before, random);
    if (at == kAll) continue;
    ++departed;
    Machine machine(before.persistent);
    for (int step = 0; step < 3; ++step) {
      machine.run(before, step > 0 ? kAll : 0);
      machine.end_step(before);
    }
    machine.run(after, at, false);
    EXPECT_TRUE(machine.end_step(after));
    check(machine.learner.trace());
    EXPECT_EQ(machine.learner.departures(), 1);
    for (int step = 0; step < 2; ++step) {
      machine.run(after, kAll);
      EXPECT_FALSE(machine.end_step(after));
    }
    EXPECT_EQ(machine.learner.departures(), 0);
    EXPECT_EQ(machine.learner.trace().operators.size(), after.ops.size());
    ASSERT_FALSE(testing::Test::HasFailure()) << "row " << row;
  }
  EXPECT_GT(departed, kRows / 2);
}

TEST(StepLearner, AStepCutShortIsAnotherStep) {
  std::mt19937 random(3);
  for (int row = 0; row < kRows; ++row) {
    Program whole = any_program(random);
    whole.ops.push_back({0, {0}, {}, {}});
    Program part = whole;
    part.ops.pop_back();
    Machine machine(whole.persistent);
    for (const Program* program : {&whole, &whole, &part, &part, &whole, &whole}) {
      static const Program* last = nullptr;
      const bool first = program == &whole && machine.learner.trace().operators.empty();
      machine.run(*program, first ? 0 : program == last ? kAll : part.ops.size(), program == last && !first);
      EXPECT_EQ(machine.end_step(*program), first || program != last);
      last = program;
    }
    ASSERT_FALSE(testing::Test::HasFailure()) << "row " << row;
  }
}

TEST(StepLearner, TwoOperatorsAtOnceAreNoStep) {
  StepLearner learner;
  const LearnedPagePtr page(new LearnedPage);
  page->bytes = 1;
  const StepLearner::Use use{page.get(), true};
  for (int step = 0; step < 2; ++step) {
    const std::size_t first = learner.begin_operator(op_name(0), {&use, 1});
    const std::size_t second = learner.begin_operator(op_name(1), {&use, 1});
    learner.end_operator(first, {&use, 1}, {}, 1, 0);
    learner.end_operator(second, {&use, 1}, {}, 1, 0);
    EXPECT_FALSE(learner.end_step());
    EXPECT_FALSE(learner.following());
    EXPECT_EQ(page->id, LearnedPage::kNoId);
  }
  for (int step = 0; step < 2; ++step) {
    learner.end_operator(learner.begin_operator(op_name(0), {&use, 1}), {&use, 1}, {}, 1, 0);
    EXPECT_EQ(learner.end_step(), step == 0);
  }
  EXPECT_TRUE(learner.following());
}

// Two optimizers: the operator after the one's step is a candidate as good as the one after the other's.
TEST(StepLearner, AStepBeginsWhereStepsBefore) {
  StepLearner learner;
  const LearnedPagePtr generator(new LearnedPage);
  const LearnedPagePtr critic(new LearnedPage);
  const StepLearner::Use of_generator{generator.get(), false};
  const StepLearner::Use of_critic{critic.get(), false};
  EXPECT_TRUE(learner.begins_step(op_name(0), {&of_generator, 1}));
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(learner.begins_step(op_name(0), {&of_critic, 1}));
    EXPECT_TRUE(learner.begins_step(op_name(0), {&of_generator, 1}));
  }
  // Until it has not come for long: training goes on with another model.
  int refused = 0;
  while (!learner.begins_step(op_name(0), {&of_critic, 1})) ++refused;
  EXPECT_GT(refused, 5);
  EXPECT_TRUE(learner.begins_step(op_name(0), {&of_critic, 1}));
}

}  // namespace
}  // namespace reef

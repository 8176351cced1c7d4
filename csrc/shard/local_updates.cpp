#include "reef/local_updates.h"

#include <ATen/ops/tensor.h>

#include <array>
#include <charconv>
#include <cmath>
#include <exception>
#include <functional>
#include <numeric>
#include <optional>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

#include "distributed/call_order.h"
#include "distributed/members.h"
#include "reef/delayed_update.h"
#include "reef/error.h"
#include "shard/check_options.h"
#include "shard/local_rounds.h"
#include "shard/together.h"

namespace reef {
namespace {

std::string number_text(double value) {
  std::array<char, 32> text{};
  const auto end = std::to_chars(text.begin(), text.end(), value);
  return {text.begin(), end.ptr};
}

[[noreturn]] void refuse(const std::string& option, const std::string& value, const std::string& next) {
  throw ConfigError("reef::LocalUpdates was given " + option + " " + value + ": give " + next + ".");
}

void check(const LocalUpdatesOptions& options, std::size_t parameters) {
  const auto whole = [](std::int64_t value) { return std::to_string(value); };
  if (options.local_steps < 1) refuse("local_steps", whole(options.local_steps), "1 or more");
  if (!std::isfinite(options.outer_lr) || options.outer_lr <= 0)
    refuse("outer_lr", number_text(options.outer_lr), "a number above 0");
  if (!(options.outer_momentum >= 0 && options.outer_momentum < 1))
    refuse("outer_momentum", number_text(options.outer_momentum), "a number from 0 to less than 1");
  if (!(options.mixing >= 0 && options.mixing < 1))
    refuse("mixing", number_text(options.mixing), "a number from 0 to less than 1");
  if (options.parts < 1 || options.parts > options.local_steps ||
      options.parts > static_cast<std::int64_t>(parameters)) {
    refuse("parts", whole(options.parts),
           "1 or more, at most as many as local_steps (" + whole(options.local_steps) + ") and parameters (" +
               std::to_string(parameters) + ")");
  }
  if (options.overlap_steps < 0 || options.overlap_steps >= options.local_steps)
    refuse("overlap_steps", whole(options.overlap_steps),
           "0 or more, and less than local_steps (" + whole(options.local_steps) + ")");
  check_compression(options.compression, options.compression_options);
  if (has_momentum(options.compression) && options.outer_momentum != 0) {
    refuse("compression " + std::string(name_of(options.compression)) +
               ", which has a momentum of its own, and outer_momentum",
           number_text(options.outer_momentum), "outer_momentum 0, or another compression");
  }
  if (options.compression == Compression::kAuto)
    refuse("compression", "auto", "a method, since prices are of exchanges in each step");
  if (options.compression == Compression::kOneBitAdam)
    refuse("compression", "one_bit_adam", "one that gives gradients, and no momentum");
}

// Throws ConfigError, on all ranks, with the first line that differs.
void check_same(Together& together, const std::string& what, const std::vector<std::string>& lines) {
  std::vector<c10::IValue> own(lines.begin(), lines.end());
  const auto all = together.gather([&] { return c10::ivalue::Tuple::create(std::move(own)); });
  together.here([&] {
    const auto line = [](const c10::IValue& of_rank, std::size_t number) {
      const auto& texts = of_rank.toTupleRef().elements();
      return number < texts.size() ? texts[number].toStringRef() : "nothing more";
    };
    for (std::size_t rank = 1; rank < all.size(); ++rank) {
      for (std::size_t number = 0; number <= lines.size(); ++number) {
        const std::string first = line(all.front(), number), other = line(all[rank], number);
        if (first == other) continue;
        throw ConfigError(what + " differs: number " + std::to_string(number) + " is " + first +
                          " on the first of the ranks, and " + other + " on rank " + std::to_string(rank) +
                          " of them; give between_copies the ranks with the same parts of the same module");
      }
    }
  });
}

OuterRule rule_of(const LocalUpdatesOptions& options) {
  const bool is_mean =
      options.outer_lr == 1 && options.outer_momentum == 0 && options.compression == Compression::kNone;
  return {is_mean, options.outer_lr, options.outer_momentum, options.nesterov};
}

}  // namespace

LocalUpdates::Rounds::Rounds(Shard& shard, Shard::Parts& all, const LocalUpdatesOptions& given)
    : parts(all),
      options(given),
      rule(rule_of(given)),
      group(given.between_copies ? given.between_copies : all.divided.group),
      schedule{given.local_steps, given.parts, given.overlap_steps} {
  const c10::Device device = parts.divided.device();
  note_call(*group, CallsMade::kLocalUpdatesBegin);
  if (options.between_copies) note_call(*parts.divided.group, CallsMade::kLocalUpdatesBegin);
  agree([&](Together& together, bool exchange_with) {
    together.here([&] { check(options, parts.parameters.size()); });
    together.here([&] { check_new(); });
    together.agree_on("what reef::LocalUpdates was given", text() + ", outer rate " + number_text(rule.lr) +
                                                               " and momentum " + number_text(rule.momentum) +
                                                               (rule.nesterov ? " (Nesterov)" : ""));
    if (options.between_copies && exchange_with)
      check_same(together, "what reef::LocalUpdates exchanges", lines());
  });

  tags = GroupTags::take(group, static_cast<int>(options.parts) + 1, device);
  name = "local updates " + std::to_string(tags.first());
  ShardOptions exchange;
  exchange.bucket_bytes = parts.options.bucket_bytes;
  exchange.compression = options.compression;
  exchange.compression_options = options.compression_options;
  std::vector<std::int64_t> elements;  // of whole parameters: the same parts on every rank of a copy
  for (auto it = parts.divided.parameters.rbegin(); it != parts.divided.parameters.rend(); ++it)
    elements.push_back(it->tensor.numel());
  std::size_t item = 0;
  for (const std::size_t end : cut_into_parts(elements, static_cast<std::size_t>(options.parts))) {
    std::vector<OuterPart::Parameter> of_part;
    for (; item < end; ++item) {
      if (parts.parameters[item].numel() > 0) of_part.push_back({parts.names[item], parts.parameters[item]});
    }
    const int number = tags.first() + static_cast<int>(outer.size());
    outer.push_back(std::make_unique<OuterPart>(std::move(of_part), group, number, exchange, rule, device));
  }
  said.emplace(group, tags.first() + static_cast<int>(outer.size()), group->getSize());
  lane = make_comm_lane(*group, device);
  if (!options.between_copies) local.emplace(shard);
  parts.begin_round = [this] { begin_round(); };
}

// All ranks have begun the same exchanges: whoever dropped one would leave the others waiting.
LocalUpdates::Rounds::~Rounds() {
  parts.begin_round = nullptr;
  note_shard_ends(*group, name);
  lane->drain();
}

// Does it among the ranks that exchange, and among those of this rank's copy, of which each exchanges with
// ranks of its own; and what is thrown anywhere is thrown everywhere.
void LocalUpdates::Rounds::agree(const std::function<void(Together&, bool)>& what) const {
  std::exception_ptr wrong;
  const auto among = [&](const ProcessGroupPtr& ranks) {
    Together together(ranks, parts.divided.device());
    try {
      together.here([&] {
        if (wrong) std::rethrow_exception(wrong);
      });
      what(together, ranks == group);
      together.agree();
    } catch (const ConfigError&) {
      wrong = std::current_exception();
    }
  };
  if (options.between_copies) among(parts.divided.group);
  among(group);
  if (options.between_copies) among(parts.divided.group);
  if (wrong) std::rethrow_exception(wrong);
}

void LocalUpdates::Rounds::check_new() const {
  if (parts.begin_round)
    throw ConfigError("reef::LocalUpdates was given a shard that has one: end that first.");
  check_no_update();
  if (parts.options.compression == Compression::kOneBitAdam) {
    throw ConfigError(
        "reef::LocalUpdates was given a shard with compression one_bit_adam, whose optimizer steps by what "
        "ranks exchange in each step: shard with another compression.");
  }
  for (std::size_t i = 0; i < parts.names.size(); ++i) {
    const at::ScalarType dtype = parts.parameters[i].scalar_type();
    if (has_momentum(options.compression) && dtype != at::kFloat) {
      throw ConfigError("reef::LocalUpdates was given compression " +
                        std::string(name_of(options.compression)) + ", and parameter " + parts.names[i] +
                        " is of " + c10::toString(dtype) + ": take another compression.");
    }
    // Where they are offloaded they travel by way of the module's device.
    const bool is_there = parts.parameters[i].device() == parts.divided.device();
    check_device("reef::LocalUpdates was given parameter " + parts.names[i] +
                     (is_there ? ", which is" : ", whose module is"),
                 parts.divided.device(), options.compression, group);
    if (options.compression == Compression::kNone || parts.parameters[i].scalar_type() != at::kHalf) continue;
    throw ConfigError(
        "reef::LocalUpdates was given a compression, and parameter " + parts.names[i] +
        " is of Half, in which what is held back would be rounded: give the shard MixedPrecision, "
        "whose masters are float32, or leave compression out.");
  }
  if (!options.between_copies && parts.divided.divided) {
    throw ConfigError(
        "reef::LocalUpdates was given a shard that divides parameters among its ranks, where one's own step "
        "is a step of its part alone: take stage kReplicate; or shard each copy over a subgroup of its own "
        "(reef::subgroup), and give between_copies, the ranks that have the same parts.");
  }
}

void LocalUpdates::Rounds::check_no_update() const {
  if (parts.update != nullptr)
    throw ConfigError(
        "reef::LocalUpdates was used beside a DelayedUpdate, whose steps it cannot see: end that.");
}

std::string LocalUpdates::Rounds::text() const {
  const std::string travels =
      rule.is_mean ? "parameters" : compression_text(options.compression, options.compression_options);
  return std::to_string(options.local_steps) + " local_steps in " + std::to_string(options.parts) +
         " parts, exchanged by " + travels + " and applied " + std::to_string(options.overlap_steps) +
         " steps later, mixing " + number_text(options.mixing);
}

// What ranks that exchange must have alike.
std::vector<std::string> LocalUpdates::Rounds::lines() const {
  std::vector<std::string> all = {"buckets of " + std::to_string(parts.options.bucket_bytes) + " bytes"};
  for (std::size_t i = 0; i < parts.names.size(); ++i) {
    std::ostringstream line;
    line << parts.names[i] << " of " << c10::toString(parts.parameters[i].scalar_type()) << ' '
         << parts.parameters[i].sizes();
    all.push_back(line.str());
  }
  for (const auto& [frozen, tensor] : parts.frozen)
    all.push_back(frozen + ", which is not trained, with digest " + std::to_string(digest_of(tensor)));
  return all;
}

void LocalUpdates::Rounds::note(const std::string& call) const { note_call(*group, call, name); }

// They are about to be written, as by an optimizer.
void LocalUpdates::Rounds::expect_writes() const {
  if (parts.gatherer) parts.gatherer->expect_step();
}

bool LocalUpdates::Rounds::stepped(std::size_t part) const {
  return step > 0 && (options.mixing != 0 || !schedule.applies(part, step));
}

void LocalUpdates::Rounds::begin(std::size_t part) {
  note("the outer step of part " + std::to_string(part) + " after local step " + std::to_string(step));
  outer[part]->begin(*lane, step);
}

void LocalUpdates::Rounds::apply(std::size_t part, double mixing) {
  outer[part]->wait(*lane);
  expect_writes();
  outer[part]->apply(mixing);
  if (part + 1 == outer.size()) parts.make_alike(group);
}

void LocalUpdates::Rounds::take_step() {
  check_no_update();
  ++step;
  for (std::size_t part = 0; part < outer.size(); ++part) {
    if (outer[part]->under_way() && schedule.applies(part, step)) apply(part, options.mixing);
  }
  for (std::size_t part = 0; part < outer.size(); ++part) {
    if (!schedule.begins(part, step)) continue;
    begin(part);
    if (options.overlap_steps == 0) apply(part, options.mixing);
  }
}

void LocalUpdates::Rounds::finish() {
  note("finish()");
  check_no_update();
  lane->wait_all();
  check_same_step();
  for (std::size_t part = 0; part < outer.size(); ++part) {
    bool differs = stepped(part);
    if (outer[part]->under_way()) {
      apply(part, options.mixing);
      differs = options.mixing != 0;
    }
    if (!differs) continue;
    begin(part);
    apply(part, /*mixing=*/0);
  }
  step = 0;
}

// By an exchange of its own: ranks that have gone another way may be telling each other something else.
void LocalUpdates::Rounds::check_same_step() {
  const c10::Device device = parts.divided.device();
  const at::Tensor steps = at::tensor({step, -step}, at::kLong).to(device);
  lane->submit([&] { said->largest(steps); });
  lane->wait_all();
  const at::Tensor heard = steps.cpu();
  const auto* const most = heard.const_data_ptr<std::int64_t>();
  const auto throw_if_differ = [&] {
    if (most[0] == -most[1]) return;
    throw ConfigError(
        "LocalUpdates::finish() was called after " + std::to_string(step) +
        " local steps on this rank, and on others after " + std::to_string(-most[1]) + " to " +
        std::to_string(most[0]) +
        ": call step() as often on every rank; begin_round() begins one with rank 0's parameters");
  };
  if (!options.between_copies) return throw_if_differ();
  agree([&](Together& together, bool) { together.here(throw_if_differ); });
}

void LocalUpdates::Rounds::drop_travelling() {
  lane->wait_all();
  for (const auto& part : outer) part->drop();
}

void LocalUpdates::Rounds::begin_round() {
  note("begin_round()");
  check_no_update();
  drop_travelling();
  expect_writes();
  for (const auto& part : outer) part->start();
  step = 0;
}

LocalUpdates::LocalUpdates(Shard& shard, const LocalUpdatesOptions& options)
    : rounds_(std::make_unique<Rounds>(shard, *shard.parts_, options)) {
  rounds_->begin_round();
}
LocalUpdates::~LocalUpdates() = default;

void LocalUpdates::step() { rounds_->take_step(); }
void LocalUpdates::finish() { rounds_->finish(); }
void LocalUpdates::begin_round() { rounds_->begin_round(); }
std::int64_t LocalUpdates::local_step() const { return rounds_->step; }
std::int64_t LocalUpdates::sent_bytes() const {
  rounds_->lane->drain();
  const auto add = [](std::int64_t sum, const auto& part) { return sum + part->sent_bytes(); };
  return std::accumulate(rounds_->outer.begin(), rounds_->outer.end(), std::int64_t{0}, add);
}
OptimizerState LocalUpdates::state() const { return rounds_->state(); }
void LocalUpdates::load_state(const OptimizerState& own) { rounds_->load_state(own); }

}  // namespace reef

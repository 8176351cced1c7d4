#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "async_updates/slice.h"
#include "reef/async_updates.h"
#include "reef/error.h"

namespace reef {
namespace {

using Kind = AsyncEvent::Kind;
using Key = std::pair<int, std::int64_t>;  // a worker's push: which worker, and at which clock

std::string text_of(const AsyncEvent& event) {
  AsyncLog one;
  one.events = {event};
  const std::string text = one.text();
  return text.substr(text.find('\n') + 1, text.rfind('\n') - text.find('\n') - 1);
}

class Replay {
 public:
  Replay(const std::vector<AsyncLog>& logs, std::vector<std::vector<float>> slices, const AsyncModel& model)
      : logs_(logs), slices_(std::move(slices)), model_(model) {
    for (std::size_t server = 0; server < logs.size(); ++server) {
      begins_.push_back(elements_);
      const auto elements = static_cast<std::int64_t>(slices_[server].size());
      elements_ += slices_[server].size();
      servers_.push_back({AsyncSlice(logs[server].options, logs[server].workers, elements),
                          std::vector<float>(slices_[server].size()),
                          0,
                          {}});
      for (std::size_t i = 0; i < logs[server].events.size(); ++i) {
        const AsyncEvent& event = logs[server].events[i];
        const Key key{event.worker, event.clock};
        if (event.kind == Kind::kPull) last_pulls_[{server, key}] = i;
        if (event.kind == Kind::kPush) ++made_[key].pushes_left;
      }
    }
  }

  std::vector<std::vector<float>> run() {
    for (bool goes_on = true; goes_on;) {
      goes_on = false;
      for (std::size_t server = 0; server < logs_.size(); ++server) {
        while (servers_[server].done < logs_[server].events.size() && take(server)) goes_on = true;
      }
    }
    for (std::size_t server = 0; server < logs_.size(); ++server) {
      if (servers_[server].done == logs_[server].events.size()) continue;
      refuse(server, "needs what no other server's log has");
    }
    return std::move(slices_);
  }

 private:
  struct Server {
    AsyncSlice slice;
    std::vector<float> gradient;
    std::size_t done;                             ///< events
    std::map<int, std::vector<float>> last_push;  ///< by worker; kElastic: its own parameters
  };
  /// What a worker pushes at one clock, of all servers' slices.
  struct Made {
    std::vector<float> given;
    std::vector<float> pushed;  ///< empty: not yet
    int pushes_left = 0;        ///< by how many servers' logs
  };

  [[noreturn]] void refuse(std::size_t server, const std::string& why) const {
    const std::size_t done = servers_[server].done;
    throw ConfigError("event " + std::to_string(done) + " of the log of server " + std::to_string(server) +
                      ", '" + text_of(logs_[server].events[done]) + "', " + why +
                      ": give the whole logs of all servers of one run, in their order.");
  }

  /// The next event of a server; false: it needs what comes from another.
  bool take(std::size_t server) {
    Server& at = servers_[server];
    const AsyncEvent& event = logs_[server].events[at.done];
    const AsyncSlice::Values values{slices_[server], at.gradient};
    std::optional<double> rate;
    at.slice.set_seconds(event.seconds);
    try {
      switch (event.kind) {
        case Kind::kPull:
          take_pull(server, event);
          break;
        case Kind::kPush: {
          Made* const made = made_of(event);
          if (made == nullptr) return false;
          const auto own = part(made->pushed, server);
          if (logs_[server].options.rule == AsyncRule::kElastic)
            at.last_push[event.worker].assign(own.begin(), own.end());
          rate = at.slice.push(event.worker, own, values);
          if (--made->pushes_left == 0) made_.erase({event.worker, event.clock});
          break;
        }
        case Kind::kLeave:
          rate = at.slice.leave(event.worker, values);
          break;
        case Kind::kJoin:
          at.slice.join(event.worker);
          break;
        case Kind::kClock:
          rate = at.slice.set_clock(event.worker, event.clock, values);
          break;
      }
    } catch (const ConfigError& error) {
      refuse(server, "cannot have been: " + message_of(error));
    }
    if (!(at.slice.log().events.back() == event))
      refuse(server, "comes out as '" + text_of(at.slice.log().events.back()) + "'");
    if (rate) {
      model_.step(static_cast<int>(server), values.parameters, values.gradient, *rate);
      at.slice.stepped();
    }
    ++at.done;
    return true;
  }

  void take_pull(std::size_t server, const AsyncEvent& event) {
    Server& at = servers_[server];
    auto given = at.slice.pull(event.worker, {slices_[server], at.gradient});
    if (!given) throw ConfigError("the worker has to wait there.");
    const auto made = made_.find({event.worker, event.clock});
    if (made == made_.end()) return;  // the worker made nothing of it
    if (made->second.given.empty()) made->second.given.resize(elements_);
    const auto own = part(made->second.given, server);
    if (given->exchanged) {
      std::vector<float>& x = at.last_push[event.worker];
      exchange_elastically(elasticity_of(logs_[server].options, logs_[server].workers), x, given->values);
      given->values = x;
    }
    std::copy(given->values.begin(), given->values.end(), own.begin());
  }

  /// nullptr: the worker has not been given all of it.
  Made* made_of(const AsyncEvent& event) {
    Made& made = made_.at({event.worker, event.clock});
    if (!made.pushed.empty()) return &made;
    for (std::size_t server = 0; server < logs_.size(); ++server) {
      const auto last = last_pulls_.find({server, {event.worker, event.clock}});
      if (last == last_pulls_.end() || servers_[server].done <= last->second) return nullptr;
    }
    made.pushed.resize(elements_);
    model_.push(event.worker, event.clock, made.given, made.pushed);
    return &made;
  }

  std::span<float> part(std::vector<float>& whole, std::size_t server) const {
    return std::span(whole).subspan(begins_[server], slices_[server].size());
  }

  const std::vector<AsyncLog>& logs_;
  std::vector<std::vector<float>> slices_;
  const AsyncModel& model_;
  std::vector<Server> servers_;
  std::vector<std::size_t> begins_;  ///< of the slices, in the whole
  std::size_t elements_ = 0;
  std::map<std::pair<std::size_t, Key>, std::size_t> last_pulls_;
  std::map<Key, Made> made_;
};

}  // namespace

std::vector<std::vector<float>> replay_async(const std::vector<AsyncLog>& logs,
                                             std::vector<std::vector<float>> slices,
                                             const AsyncModel& model) {
  if (logs.empty() || logs.size() != slices.size())
    throw ConfigError("replay_async was given " + std::to_string(logs.size()) + " logs and " +
                      std::to_string(slices.size()) + " slices: give one of each for every server.");
  for (const AsyncLog& log : logs) {
    check_async_options(log.options, log.workers);
    AsyncLog like = logs.front();
    like.events = log.events;
    if (like.text() != log.text() || log.options.servers != static_cast<int>(logs.size()))
      throw ConfigError(
          "replay_async was given logs of " + std::to_string(logs.size()) +
          " servers whose options differ, or are of another number of servers: give those of one run.");
  }
  return Replay(logs, std::move(slices), model).run();
}

}  // namespace reef

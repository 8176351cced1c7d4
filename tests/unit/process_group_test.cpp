#include "reef/process_group.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <torch/torch.h>
#include <unistd.h>

#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "reef/collectives.h"
#include "reef/error.h"

namespace reef {
namespace {

using std::chrono::milliseconds;
using Tensors = std::vector<at::Tensor>;

ProcessGroupOptions options_of(int rank, int world_size, const std::string& store,
                               milliseconds timeout = std::chrono::seconds(60)) {
  ProcessGroupOptions options;
  options.rank = rank;
  options.world_size = world_size;
  options.store = store;
  options.timeout = timeout;
  return options;
}

/// A listening port of 127.0.0.1 that accepts and says nothing.
class Listener {
 public:
  Listener() {
    descriptor_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    const bool listens = ::bind(descriptor_, generic, size) == 0 && ::listen(descriptor_, 4) == 0 &&
                         ::getsockname(descriptor_, generic, &size) == 0;
    TORCH_CHECK(listens, "no port can be opened on this machine");
    port = ntohs(address.sin_port);
  }
  ~Listener() { ::close(descriptor_); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  std::string store() const { return "tcp://127.0.0.1:" + std::to_string(port); }
  int port = 0;

 private:
  int descriptor_ = -1;
};

/// A port that nothing listens on.
std::string free_store() { return Listener().store(); }

/// A folder of its own for each test that needs files.
class Folder {
 public:
  Folder() {
    std::string pattern = std::filesystem::temp_directory_path() / "reef_process_group_XXXXXX";
    TORCH_CHECK(::mkdtemp(pattern.data()) != nullptr, "no folder can be made in ", pattern);
    path = pattern;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::filesystem::path path;
};

/// The error that bringing up a group with `options` ends in.
std::optional<ProcessGroupError> error_of(const ProcessGroupOptions& options) {
  try {
    init_process_group(options);
  } catch (const ProcessGroupError& error) {
    return error;
  }
  return std::nullopt;
}

void expect_words(const std::exception& error, const std::vector<std::string>& words) {
  const auto text = message_of(error);
  for (const auto& word : words)
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' in: " << text;
}

std::ptrdiff_t open_descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"),
                       std::filesystem::directory_iterator());
}

/// Runs `body` as each rank of `ranks`, one thread a rank, and gives back what each threw ("" for nothing).
std::vector<std::string> as_ranks(int ranks, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = message_of(error);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return errors;
}

const std::vector<at::ScalarType> kDtypes = {
    at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,     at::kByte,          at::kChar,         at::kShort,
    at::kInt,   at::kLong,   at::kBool, at::kComplexFloat, at::kComplexDouble, at::kFloat8_e4m3fn};

at::Tensor some(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::arange(1, c10::multiply_integers(sizes) + 1, at::kFloat).reshape(sizes).to(dtype);
}

bool same(const at::Tensor& left, const at::Tensor& right) {
  return left.scalar_type() == right.scalar_type() && left.numel() == right.numel() &&
         at::equal(left.reshape(-1).view(at::kByte), right.reshape(-1).view(at::kByte));
}

TEST(WorldOfOne, OpensNothing) {
  const auto before = open_descriptors();
  const auto group = init_process_group(options_of(0, 1, ""));
  EXPECT_EQ(group->getRank(), 0);
  EXPECT_EQ(group->getSize(), 1);
  EXPECT_EQ(open_descriptors(), before);
}

/// Every collective of a c10d backend, for every dtype and for tensors without elements.
TEST(WorldOfOne, EveryCollectiveIsTheIdentity) {
  const auto backend = init_process_group(options_of(0, 1, ""))->getBackend(c10::kCPU);
  using Collective = std::function<c10::intrusive_ptr<c10d::Work>(at::Tensor & output, at::Tensor & input)>;
  std::vector<int64_t> all;
  const std::vector<std::pair<const char*, Collective>> into_output = {
      {"allgather",
       [&](auto& out, auto& in) {
         std::vector<Tensors> outs = {{out}};
         Tensors ins = {in};
         return backend->allgather(outs, ins);
       }},
      {"allgather_coalesced",
       [&](auto& out, auto& in) {
         std::vector<Tensors> outs = {{out}};
         Tensors ins = {in};
         return backend->allgather_coalesced(outs, ins);
       }},
      {"_allgather_base", [&](auto& out, auto& in) { return backend->_allgather_base(out, in); }},
      {"allgather_into_tensor_coalesced",
       [&](auto& out, auto& in) {
         Tensors outs = {out};
         Tensors ins = {in};
         return backend->allgather_into_tensor_coalesced(outs, ins);
       }},
      {"gather",
       [&](auto& out, auto& in) {
         std::vector<Tensors> outs = {{out}};
         Tensors ins = {in};
         return backend->gather(outs, ins);
       }},
      {"scatter",
       [&](auto& out, auto& in) {
         Tensors outs = {out};
         std::vector<Tensors> ins = {{in}};
         return backend->scatter(outs, ins);
       }},
      {"reduce_scatter",
       [&](auto& out, auto& in) {
         Tensors outs = {out};
         std::vector<Tensors> ins = {{in}};
         return backend->reduce_scatter(outs, ins);
       }},
      {"_reduce_scatter_base", [&](auto& out, auto& in) { return backend->_reduce_scatter_base(out, in); }},
      {"reduce_scatter_tensor_coalesced",
       [&](auto& out, auto& in) {
         Tensors outs = {out};
         Tensors ins = {in};
         return backend->reduce_scatter_tensor_coalesced(outs, ins);
       }},
      {"alltoall_base", [&](auto& out, auto& in) { return backend->alltoall_base(out, in, all, all); }},
      {"alltoall",
       [&](auto& out, auto& in) {
         Tensors outs = {out};
         Tensors ins = {in};
         return backend->alltoall(outs, ins);
       }},
  };
  using InPlace = std::function<c10::intrusive_ptr<c10d::Work>(Tensors&)>;
  const std::vector<std::pair<const char*, InPlace>> in_place = {
      {"broadcast", [&](Tensors& each) { return backend->broadcast(each); }},
      {"allreduce", [&](Tensors& each) { return backend->allreduce(each); }},
      {"allreduce_coalesced", [&](Tensors& each) { return backend->allreduce_coalesced(each); }},
      {"reduce", [&](Tensors& each) { return backend->reduce(each); }},
  };
  for (const auto dtype : kDtypes) {
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{2, 3}, {0, 3}, {}}) {
      const auto row =
          std::string(c10::toString(dtype)) + " of " + std::to_string(sizes.size()) + " dimensions";
      for (const auto& [name, run] : into_output) {
        auto input = some(sizes, dtype);
        auto output = at::zeros(sizes, dtype);
        const auto work = run(output, input);
        EXPECT_TRUE(work->isCompleted() && work->isSuccess() && work->wait()) << name << ' ' << row;
        EXPECT_TRUE(same(output, some(sizes, dtype)) && same(input, output)) << name << ' ' << row;
        EXPECT_TRUE(work->getFuture()->value().isTensorList()) << name;
      }
      for (const auto& [name, run] : in_place) {
        Tensors tensors = {some(sizes, dtype)};
        EXPECT_TRUE(run(tensors)->wait()) << name << ' ' << row;
        EXPECT_TRUE(same(tensors[0], some(sizes, dtype))) << name << ' ' << row;
      }
    }
  }
  EXPECT_TRUE(backend->barrier()->wait());
}

TEST(WorldOfOne, OutputsMayHaveTheShapeOfAGatheredTensorOrLieElsewhereInTheInput) {
  const auto backend = init_process_group(options_of(0, 1, ""))->getBackend(c10::kCPU);
  auto input = some({2, 3}, at::kFloat);
  auto stacked = at::zeros({1, 2, 3});
  backend->_allgather_base(stacked, input)->wait();
  EXPECT_TRUE(at::equal(stacked[0], input));
  auto itself = input.view(-1);
  backend->_allgather_base(itself, input)->wait();
  EXPECT_TRUE(at::equal(input, some({2, 3}, at::kFloat)));
  auto strided = at::zeros({3, 2}).t();
  backend->_reduce_scatter_base(strided, input)->wait();
  EXPECT_TRUE(at::equal(strided, input));
  auto small = at::zeros({5});
  EXPECT_THROW(backend->_allgather_base(small, input), c10::Error);
  auto leaf = at::zeros({2, 3}).requires_grad_();
  backend->_allgather_base(leaf, input)->wait();
  EXPECT_TRUE(at::equal(leaf, input));
}

/// The one reduction that changes a single value.
TEST(WorldOfOne, MultipliesBeforeASumThatAsksForIt) {
  const auto group = init_process_group(options_of(0, 1, ""));
  c10d::AllreduceOptions options;
  options.reduceOp.op_ = c10d::ReduceOp::PREMUL_SUM;
  options.reduceOp.supplement_ = c10::make_intrusive<c10d::NCCLPreMulSumSupplement>(0.5);
  Tensors tensors = {at::full({3}, 8.0)};
  group->getBackend(c10::kCPU)->allreduce(tensors, options)->wait();
  EXPECT_TRUE(at::equal(tensors[0], at::full({3}, 4.0)));
}

TEST(WorldOfOne, ServesTheDispatchersOperatorsAndOurCollectives) {
  const auto group = init_process_group(options_of(0, 1, ""));
  Tensors tensors = {some({4}, at::kFloat)};
  group->allreduce(tensors)->wait();
  group->broadcast(tensors)->wait();
  std::vector<Tensors> gathered = {{at::zeros({4})}};
  group->allgather(gathered, tensors)->wait();
  group->barrier()->wait();
  all_reduce(tensors, group, Reduction::kMean);
  broadcast(tensors, group);
  barrier(group);
  EXPECT_TRUE(at::equal(tensors[0], some({4}, at::kFloat)));
  EXPECT_TRUE(at::equal(gathered[0][0], tensors[0]));
}

TEST(BringUp, RanksMeetInAFileAndTheFileGoesWithTheLast) {
  const Folder folder;
  for (const int ranks : {2, 3}) {
    const auto path = folder.path / std::to_string(ranks);
    const auto errors = as_ranks(ranks, [&](int rank) {
      const auto group = init_process_group(options_of(rank, ranks, "file://" + path.string()));
      const at::Tensor tensor = at::full({100}, rank + 1.0);
      all_reduce(tensor, group);
      TORCH_CHECK(at::equal(tensor, at::full({100}, ranks * (ranks + 1) / 2.0)));
    });
    EXPECT_EQ(errors, std::vector<std::string>(static_cast<std::size_t>(ranks)));
    EXPECT_FALSE(std::filesystem::exists(path));
  }
}

TEST(BringUp, RanksMeetAtAPortAgainAndAgain) {
  const auto store = free_store();
  for (int round = 0; round < 3; ++round) {
    const auto errors =
        as_ranks(2, [&](int rank) { barrier(init_process_group(options_of(rank, 2, store))); });
    EXPECT_EQ(errors, std::vector<std::string>(2)) << "round " << round;
  }
}

TEST(BringUp, NamesAPortInUse) {
  const Listener taken;
  const auto error = error_of(options_of(0, 2, taken.store()));
  ASSERT_TRUE(error);
  EXPECT_EQ(error->rank(), 0);
  expect_words(*error, {"rank 0 of 2", taken.store(), "in use", "another port"});
}

/// What the store's address may do to a rank that only connects. Each ends soon after its timeout; the test's
/// own time limit is what would show one that hangs.
TEST(BringUp, NamesAStoreThatCannotBeReached) {
  const Listener silent;
  const milliseconds timeout(300);
  const std::vector<std::pair<std::string, std::string>> rows = {
      {free_store(), "Connection refused"},
      {silent.store(), "did not answer as a store"},
      {"tcp://no-such-host.invalid:29500", "host name"},
  };
  for (const auto& [store, words] : rows) {
    const auto error = error_of(options_of(1, 2, store, timeout));
    ASSERT_TRUE(error) << store;
    EXPECT_EQ(error->rank(), 1);
    expect_words(*error, {"rank 1 of 2", store, "within 0.3 s", words});
  }
}

TEST(BringUp, NamesAFileThatCannotBeOpened) {
  const Folder folder;
  const std::vector<std::pair<std::string, std::string>> rows = {
      {folder.path / "no" / "folder", "No such file or directory"}, {folder.path, "Is a directory"}};
  for (const auto& [path, reason] : rows) {
    const auto error = error_of(options_of(0, 2, "file://" + path));
    ASSERT_TRUE(error) << path;
    expect_words(*error, {"rank 0 of 2", "file://" + path, reason, "every rank can write"});
  }
}

TEST(BringUp, NamesTheRanksThatAreMissing) {
  const auto store = free_store();
  std::vector<std::string> errors(4);
  as_ranks(4, [&](int rank) {
    if (rank == 1 || rank == 3) return;
    const auto error = error_of(options_of(rank, 4, store, std::chrono::seconds(10)));
    if (error) errors[static_cast<std::size_t>(rank)] = message_of(*error);
  });
  EXPECT_NE(errors[0].find("ranks 1 and 3 of 4 did not check in at " + store + " within 10 s"),
            std::string::npos)
      << errors[0];
  EXPECT_EQ(errors[0], errors[2]) << "all ranks say the same";
}

TEST(BringUp, FailsOnAllRanksWithTheReasonOfTheOneThatCannotJoin) {
  const Folder folder;
  const auto errors = as_ranks(3, [&](int rank) {
    auto options = options_of(rank, 3, "file://" + (folder.path / "meet").string());
    if (rank == 1) options.interface = "no_such_interface";
    init_process_group(options);
  });
  EXPECT_NE(errors[0].find("rank 1 of 3 (process "), std::string::npos) << errors[0];
  for (const char* word : {"no_such_interface", "ProcessGroupOptions::interface", "lo"}) {
    EXPECT_NE(errors[0].find(word), std::string::npos) << word << " in " << errors[0];
  }
  EXPECT_EQ(errors[0], errors[1]);
  EXPECT_EQ(errors[0], errors[2]);
}

TEST(BringUp, RefusesRanksThatDisagreeOnTheWorldSize) {
  const Folder folder;
  const auto errors = as_ranks(2, [&](int rank) {
    init_process_group(options_of(rank, 2 + rank, "file://" + (folder.path / "meet").string()));
  });
  for (const auto& error : errors)
    EXPECT_NE(error.find("start every rank with the same world size"), std::string::npos) << error;
}

/// A group that failed leaves nothing behind that would keep the next from coming up at the same address.
TEST(BringUp, CanBeTriedAgainAfterAFailure) {
  const auto store = free_store();
  const auto failed = as_ranks(2, [&](int rank) {
    auto options = options_of(rank, 2, store);
    if (rank == 1) options.interface = "no_such_interface";
    init_process_group(options);
  });
  EXPECT_NE(failed[0], "");
  EXPECT_NE(failed[1], "");
  const auto errors = as_ranks(2, [&](int rank) { barrier(init_process_group(options_of(rank, 2, store))); });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

TEST(BringUp, CanBeTriedAgainInTheSameFileAfterAFailure) {
  const Folder folder;
  const auto store = "file://" + (folder.path / "meet").string();
  const std::vector<std::string> others = {"ranks 1 and 2", "ranks 0 and 2", "ranks 0 and 1"};
  for (int rank = 0; rank < 3; ++rank) {
    const auto alone = error_of(options_of(rank, 3, store, std::chrono::seconds(10)));
    ASSERT_TRUE(alone);
    expect_words(*alone, {others[static_cast<std::size_t>(rank)] + " of 3 did not check in"});
    EXPECT_TRUE(std::filesystem::is_empty(folder.path));
  }
  const auto errors = as_ranks(3, [&](int rank) { barrier(init_process_group(options_of(rank, 3, store))); });
  EXPECT_EQ(errors, std::vector<std::string>(3));
}

TEST(BringUp, RefusesAnEnvironmentThatIsHalfSet) {
  ::setenv("RANK", "0", 1);
  ::unsetenv("WORLD_SIZE");
  EXPECT_THROW(init_process_group(), ConfigError);
  ::unsetenv("RANK");
}

}  // namespace
}  // namespace reef

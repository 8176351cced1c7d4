#include "distributed/slice_exchange.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>

#include "alias.h"
#include "distributed/comm_lane.h"
#include "distributed/connection.h"
#include "distributed/group_compat.h"
#include "distributed/members.h"
#include "distributed/sigpipe.h"
#include "distributed/tag_space.h"

namespace reef {
namespace {

using at::Tensor;

constexpr int kTags = TagSpace::kPerNumber / 2;  // of calls in order; as many of subjects
constexpr const char* kOfParameters = "the all-gather of parameters";

}  // namespace

SliceExchange::SliceExchange(ProcessGroupPtr group, int number, int degree)
    : group_(std::move(group)),
      all_{0, group_->getSize(), 1, group_->getRank()},
      copy_{all_.place / degree * degree, degree, 1, all_.place % degree},
      first_tag_(TagSpace::kExchanges + number * TagSpace::kPerNumber) {}

bool SliceExchange::in_any_order(c10::Device device) const { return by_messages(*group_, device); }

Tensor SliceExchange::slice(const Tensor& flat, int number, int count) {
  const std::int64_t elements = flat.numel() / count;
  return alias(flat, number * elements, elements);
}

int SliceExchange::next_tag() { return first_tag_ + calls_++ % kTags; }

// gloo writes to the socket on the thread that calls, if it can.
SliceExchange::Issued SliceExchange::send(const Tensor& from, int rank, int tag) const {
  const SigpipeBlocked blocked;
  std::vector<Tensor> tensors = {from};
  return {group_->send(tensors, rank, tag), rank};
}

SliceExchange::Issued SliceExchange::receive(const Tensor& to, int rank, int tag) const {
  const SigpipeBlocked blocked;
  std::vector<Tensor> tensors = {to};
  return {group_->recv(tensors, rank, tag), rank};
}

void SliceExchange::wait(const Works& works) const {
  Heartbeat* const heart = heart_of(*group_);
  const auto gloo = group_->getBackend(c10::kCPU);
  for (const auto& [work, rank] : works) {
    if (heart != nullptr) {
      heart->wait_for_message(work, *gloo, rank);
    } else {
      wait_connected(*work, *gloo, rank);
    }
  }
}

void SliceExchange::run(const std::string& name, const Tensor& flat,
                        const std::function<void(Works&)>& issue) const {
  note_call(*group_, name);
  Works works;
  name_failures(name, [&] {
    issue(works);  // a connection that is known to be gone is refused here already
    if (by_messages(*group_, flat.device())) return wait(works);
    for (const auto& each : works) each.work->wait();
  });
  used_by_this_stream(flat);
}

void SliceExchange::name_failures(const std::string& name, const std::function<void()>& what) const {
  try {
    if (Heartbeat* const heart = heart_of(*group_)) heart->check();
    what();
  } catch (const std::exception& error) {
    std::rethrow_exception(rank_failed(*group_, in_step(name), error));
  }
}

std::string SliceExchange::in_step(const std::string& name) const {
  const std::int64_t step = step_;
  return step > 0 ? name + " in step " + std::to_string(step) : name;
}

void SliceExchange::refuse(const char* name, int rank, const std::string& what) const {
  std::rethrow_exception(rank_sent_nonsense(*group_, in_step(name), rank, what));
}

void SliceExchange::used_by_this_stream(const Tensor& tensor) {
  if (tensor.is_cpu()) return;
  tensor.record_stream(c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device()));
}

std::vector<std::int64_t> SliceExchange::elements_for(const RanksAmong& among, std::int64_t each) const {
  std::vector<std::int64_t> elements(static_cast<std::size_t>(all_.count));
  for (int number = 0; number < among.count; ++number) {
    elements[static_cast<std::size_t>(among.at(number))] = each;
  }
  return elements;
}

void SliceExchange::all_gather(const Tensor& flat) {
  gather(kOfParameters, flat, copy_);
  count_sent((copy_.count - 1) * static_cast<std::int64_t>(own_slice(flat).nbytes()));
}

std::function<void()> SliceExchange::begin_all_gather(const Tensor& flat, int subject) {
  count_sent((copy_.count - 1) * static_cast<std::int64_t>(own_slice(flat).nbytes()));
  Works works;
  name_failures(kOfParameters,
                [&] { issue_gather(flat, copy_, first_tag_ + kTags + subject % kTags, works); });
  return [this, flat, works = std::move(works)] { name_failures(kOfParameters, [&] { wait(works); }); };
}

void SliceExchange::all_gather(const char* name, const Tensor& flat, const RanksAmong& among) {
  gather(name, flat, among);
  count_sent((among.count - 1) * static_cast<std::int64_t>(flat.nbytes()) / among.count);
}

void SliceExchange::all_to_all(const char* name, const Tensor& from, const Tensor& to,
                               const RanksAmong& among) {
  const Tensor own = slice(to, among.place, among.count);
  count_sent((among.count - 1) * static_cast<std::int64_t>(own.nbytes()));
  if (among.count > 1 && !by_messages(*group_, from.device())) {
    Tensor sent = from;
    Tensor received = to;
    run(name, received, [&](Works& works) {
      works.push_back({compat::all_to_all(*group_, received, sent, elements_for(among, own.numel()))});
    });
    return used_by_this_stream(from);
  }
  own.copy_(slice(from, among.place, among.count));
  const int tag = next_tag();  // even of no elements: other ranks, which have some, count on
  if (from.numel() == 0) return;
  run(name, to, [&](Works& works) {
    for (int step = 1; step < among.count; ++step) {
      const int number = among.number_behind(among.count - step);
      works.push_back(receive(slice(to, number, among.count), among.at(number), tag));
    }
    for (int step = 1; step < among.count; ++step) {
      const int number = among.number_behind(step);
      works.push_back(send(slice(from, number, among.count), among.at(number), tag));
    }
  });
}

void SliceExchange::transfer(const char* name, const std::vector<Transfer>& sent,
                             const std::vector<Transfer>& received, const at::TensorOptions& options) {
  for (const Transfer& each : sent) count_sent(static_cast<std::int64_t>(each.tensor.nbytes()));
  const int tag = next_tag();  // even of nothing: other ranks, which have something, count on
  if (by_messages(*group_, options.device())) {
    if (sent.empty() && received.empty()) return;
    return run(name, (received.empty() ? sent : received).front().tensor, [&](Works& works) {
      for (const Transfer& each : received) works.push_back(receive(each.tensor, each.rank, tag));
      for (const Transfer& each : sent) works.push_back(send(each.tensor, each.rank, tag));
    });
  }
  const auto in_order = [](std::vector<Transfer> all) {
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
    return all;
  };
  const auto elements_of = [&](const std::vector<Transfer>& all) {
    std::vector<std::int64_t> elements(static_cast<std::size_t>(all_.count));
    for (const Transfer& each : all) elements[static_cast<std::size_t>(each.rank)] = each.tensor.numel();
    return elements;
  };
  std::vector<Tensor> parts = {at::empty({0}, options)};
  for (const Transfer& each : in_order(sent)) parts.push_back(each.tensor);
  Tensor from = at::cat(parts);
  const std::vector<std::int64_t> elements = elements_of(received);
  Tensor to = at::empty({std::accumulate(elements.begin(), elements.end(), std::int64_t{0})}, options);
  run(name, to, [&](Works& works) {
    works.push_back({compat::all_to_all(*group_, to, from, elements, elements_of(sent))});
  });
  used_by_this_stream(from);
  std::int64_t begin = 0;
  for (const Transfer& each : in_order(received)) {
    each.tensor.copy_(alias(to, begin, each.tensor.numel()));
    begin += each.tensor.numel();
  }
}

void SliceExchange::tell(const Tensor& flat) { gather("the exchange of flags and texts", flat, all_); }

void SliceExchange::gather(const char* name, const Tensor& flat, const RanksAmong& among) {
  if (among.count == 1) return;
  if (!by_messages(*group_, flat.device())) {
    const Tensor own = slice(flat, among.place, among.count);
    Tensor to = flat;
    Tensor from = own;
    run(name, flat, [&](Works& works) {
      if (among.count == all_.count) {
        works.push_back({compat::all_gather(*group_, to, from)});
        return;
      }
      from = own.repeat({among.count});
      works.push_back({compat::all_to_all(*group_, to, from, elements_for(among, own.numel()))});
    });
    return;
  }
  // Even of no elements: other ranks, which have some, count on.
  const int tag = next_tag();
  run(name, flat, [&](Works& works) { issue_gather(flat, among, tag, works); });
}

void SliceExchange::issue_gather(const Tensor& flat, const RanksAmong& among, int tag, Works& works) const {
  if (flat.numel() == 0) return;
  for (int step = 1; step < among.count; ++step) {
    const int from = among.number_behind(among.count - step);
    works.push_back(receive(slice(flat, from, among.count), among.at(from), tag));
  }
  const Tensor own = slice(flat, among.place, among.count);
  for (int step = 1; step < among.count; ++step)
    works.push_back(send(own, among.at(among.number_behind(step)), tag));
}

void SliceExchange::largest(const Tensor& values) {
  if (all_.count == 1) return;
  const std::int64_t count = values.numel();
  const Tensor all = at::empty({all_.count * count}, values.options());
  slice(all, all_.place, all_.count).copy_(values);
  tell(all);
  values.copy_(all.view({all_.count, count}).amax(0));
}

}  // namespace reef

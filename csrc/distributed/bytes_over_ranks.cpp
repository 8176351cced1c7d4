#include "distributed/bytes_over_ranks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "distributed/slice_exchange.h"
#include "distributed/tag_space.h"

namespace reef {

using at::Tensor;

std::vector<Tensor> gather_bytes(const Tensor& own, const ProcessGroupPtr& group, c10::Device device) {
  const std::int64_t ranks = group->getSize();
  if (ranks == 1) return {own};
  SliceExchange exchange(group, TagSpace::kAgreement, group->getSize());
  Tensor sizes = at::zeros({ranks}, at::TensorOptions().dtype(at::kLong).device(device));
  exchange.own_slice(sizes).fill_(own.numel());
  exchange.tell(sizes);
  sizes = sizes.cpu();
  const std::int64_t most = sizes.max().item<std::int64_t>();
  Tensor all = at::zeros({ranks * most}, at::TensorOptions().dtype(at::kByte).device(device));
  exchange.own_slice(all).narrow(0, 0, own.numel()).copy_(own);
  exchange.tell(all);
  all = all.cpu();
  std::vector<Tensor> found;
  for (std::int64_t rank = 0; rank < ranks; ++rank)
    found.push_back(all.narrow(0, rank * most, sizes[rank].item<std::int64_t>()));
  return found;
}

std::vector<std::string> gather_texts(const std::string& own, const ProcessGroupPtr& group,
                                      c10::Device device) {
  const auto size = static_cast<std::int64_t>(own.size());
  const Tensor bytes = at::from_blob(const_cast<char*>(own.data()), {size}, at::kByte);
  std::vector<std::string> all;
  for (const Tensor& text : gather_bytes(bytes, group, device))
    all.emplace_back(static_cast<const char*>(text.const_data_ptr()), static_cast<std::size_t>(text.numel()));
  return all;
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

Tensor broadcast_bytes(const Tensor& of_first, const ProcessGroupPtr& group, c10::Device device) {
  if (group->getSize() == 1) return of_first;
  const bool first = group->getRank() == 0;
  const Tensor size =
      at::full({1}, first ? of_first.numel() : 0, at::TensorOptions().dtype(at::kLong)).to(device);
  broadcast({size}, group);
  Tensor bytes =
      first ? of_first.to(device)
            : at::empty({size.item<std::int64_t>()}, at::TensorOptions().dtype(at::kByte).device(device));
  if (bytes.numel() > 0) broadcast({bytes}, group);
  return bytes.cpu();
}

}  // namespace reef

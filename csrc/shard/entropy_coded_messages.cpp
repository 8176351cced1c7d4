#include "shard/entropy_coded_messages.h"

#include <ATen/ops/empty.h>

#include <string>
#include <vector>

#include "kernels/level_code.h"

namespace reef {
namespace {

using at::Tensor;

constexpr const char* kLengths = "the exchange of lengths of codes";

// Returns the number of blocks in a slice of packed levels.
std::int64_t blocks_of(const Tensor& slice, int bits) {
  return slice.numel() / kernels::packed_bytes(kernels::kLevelBlock, bits);
}

Tensor entropy_code(const Tensor& slice, int bits) {
  const std::int64_t blocks = blocks_of(slice, bits);
  const Tensor code = at::empty({kernels::most_level_code_bytes(blocks, bits)}, slice.options());
  const std::int64_t bytes = kernels::encode_level_code(slice.const_data_ptr<std::uint8_t>(), blocks, bits,
                                                        code.mutable_data_ptr<std::uint8_t>());
  return code.narrow(0, 0, bytes);
}

// Sends each other rank its code, receives theirs, and decodes them into the slices of `to`. `lengths` has
// the bytes of the code that comes from each rank.
void exchange(SliceExchange& ranks, const char* name, const std::vector<Tensor>& codes, const Tensor& lengths,
              const Tensor& to, const RanksAmong& among, int bits) {
  std::vector<SliceExchange::Transfer> sent, received;
  std::vector<Tensor> slices;
  for (int step = 1; step < among.count; ++step) {  // each rank begins with another
    const int next = among.number_behind(step), from = among.number_behind(among.count - step);
    sent.push_back({among.at(next), codes[static_cast<std::size_t>(next)]});
    const Tensor& slice = slices.emplace_back(SliceExchange::slice(to, from, among.count));
    const std::int64_t bytes = lengths.const_data_ptr<std::int64_t>()[from];
    const std::int64_t most = kernels::most_level_code_bytes(blocks_of(slice, bits), bits);
    if (bytes < 1 || bytes > most) {
      ranks.refuse(name, among.at(from),
                   std::to_string(bytes) + " for the length of a code of levels, which has 1 to " +
                       std::to_string(most) + " bytes");
    }
    received.push_back({among.at(from), at::empty({bytes}, to.options())});
  }
  ranks.transfer(name, sent, received, to.options());
  for (std::size_t i = 0; i < received.size(); ++i) {
    const auto& [rank, code] = received[i];
    const char* const wrong = kernels::decode_level_code(code.const_data_ptr<std::uint8_t>(), code.numel(),
                                                         blocks_of(slices[i], bits), bits,
                                                         slices[i].mutable_data_ptr<std::uint8_t>());
    if (wrong != nullptr) {
      ranks.refuse(name, rank,
                   "what is no code of levels of " + std::to_string(bits) + " bits (" + wrong + ")");
    }
  }
}

Tensor numbers(int count) { return at::empty({count}, at::TensorOptions().dtype(at::kLong)); }

}  // namespace

void all_to_all_entropy_coded(SliceExchange& ranks, const char* name, const Tensor& from, const Tensor& to,
                              const RanksAmong& among, int bits) {
  if (from.numel() == 0) return ranks.all_to_all(name, from, to, among);
  const Tensor own = numbers(among.count), lengths = numbers(among.count);
  std::vector<Tensor> codes(static_cast<std::size_t>(among.count));
  for (int number = 0; number < among.count; ++number) {
    Tensor& code = codes[static_cast<std::size_t>(number)];
    const Tensor slice = SliceExchange::slice(from, number, among.count);
    if (number == among.place) {
      SliceExchange::slice(to, number, among.count).copy_(slice);
    } else {
      code = entropy_code(slice, bits);
    }
    own.mutable_data_ptr<std::int64_t>()[number] = code.defined() ? code.numel() : 0;
  }
  ranks.all_to_all(kLengths, own, lengths, among);
  exchange(ranks, name, codes, lengths, to, among, bits);
}

void all_gather_entropy_coded(SliceExchange& ranks, const char* name, const Tensor& codes,
                              const RanksAmong& among, int bits) {
  if (codes.numel() == 0) return ranks.all_gather(name, codes, among);
  const Tensor code = entropy_code(SliceExchange::slice(codes, among.place, among.count), bits);
  const Tensor lengths = numbers(among.count);
  lengths.mutable_data_ptr<std::int64_t>()[among.place] = code.numel();
  ranks.all_gather(kLengths, lengths, among);
  exchange(ranks, name, std::vector<Tensor>(static_cast<std::size_t>(among.count), code), lengths, codes,
           among, bits);
}

}  // namespace reef

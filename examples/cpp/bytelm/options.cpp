#include "options.h"

#include <torch/cuda.h>

#include <boost/program_options.hpp>
#include <cmath>
#include <iostream>
#include <iterator>

#include "reef/bytes.h"
#include "reef/error.h"
#include "reef/optim.h"

namespace bytelm {
namespace {

namespace po = boost::program_options;

po::options_description describe(Options& options) {
  const auto number = [](std::int64_t& target) { return po::value(&target)->default_value(target); };
  const auto text = [](std::string& target) { return po::value(&target)->value_name("FILE"); };
  po::options_description all(
      "bytelm trains a byte-level GPT on text and shows where its memory goes.\nOptions", 100);
  auto add = all.add_options();
  add("help", "this text");
  add("data", po::value(&options.data)->multitoken()->value_name("PATH..."),
      "files and folders to learn from; by default the source text of Python's standard library");
  add("width", number(options.width), "features of a token; a multiple of --heads");
  add("depth", number(options.depth), "attention blocks");
  add("heads", number(options.heads), "attention heads of a block");
  add("context", number(options.context), "bytes the model sees at once");
  add("batch", number(options.batch), "windows in a step, on each rank");
  add("steps", number(options.steps), "training steps");
  add("optimizer", po::value(&options.optimizer)->default_value(options.optimizer), "adamw or sgd");
  add("state", po::value(&options.state)->value_name("FORMAT"),
      "step by reef::optim with states in float32, bfloat16, int8, int4, companded8, int8_compensated, ...");
  add("stage", po::value<std::string>()->value_name("STAGE"),
      "what ranks divide: replicate (nothing), optimizer, gradients or parameters, or 0 to 3");
  add("compression", po::value<std::string>()->value_name("METHOD"),
      "how gradients travel between ranks: none, bfloat16, gtopk, powersgd, ...");
  add("density", po::value<double>()->value_name("SHARE"),
      "of a gradient's elements, which are sent by topk and gtopk");
  add("learning-rate", po::value(&options.learning_rate)->default_value(options.learning_rate, "0.003"),
      "largest learning rate");
  add("seed", number(options.seed), "of the parameters, the batches and the sample");
  add("threads", po::value(&options.threads), "threads of an operator; by default LibTorch decides");
  add("device", po::value(&options.device)->default_value(options.device), "cpu, cuda or cuda:N");
  add("eval-every", number(options.eval_every), "steps between two validations");
  add("sample", number(options.sample), "bytes to write when trained; 0 for none");
  add("save", text(options.save), "keep a checkpoint here, written at the end");
  add("save-every", po::value(&options.save_every), "and every so many steps");
  add("resume", text(options.resume), "go on from this checkpoint");
  add("chart", text(options.chart)->default_value(options.chart), "SVG of the bytes alive during one step");
  add("trace", text(options.trace), "the same as a Chrome trace (JSON)");
  add("losses", text(options.losses),
      "the loss of each step as a JSON line (FILE.rank1 and so on for the other ranks)");
  add("summary", text(options.summary), "what the run came to: loss, speed and peak, as JSON");
  add("budget", po::value<std::string>()->value_name("SIZE"),
      "train inside so many bytes (12MiB), bit for bit the same");
  add("spill", po::value(&options.spill)->value_name("FOLDER"),
      "what leaves goes to a file there, by default to host memory");
  add("recompute-within", po::value<std::string>()->value_name("SIZE"),
      "blocks keep no more than so many bytes for backward, and compute the rest once more, bit for bit the "
      "same");
  add("pipeline", po::value(&options.pipeline)->value_name("COUNT"),
      "cut the model over the ranks, and a step into so many micro-batches; divides --batch");
  add("schedule", po::value(&options.schedule)->value_name("NAME"),
      "of the pipeline: 1f1b, zbv, ...; by default planned for the ranks and links that there are");
  add("replicas", number(options.replicas), "of the pipeline, each with a --batch of its own");
  add("no-ledger", "do not count memory, to measure what counting costs");
  return all;
}

void require(bool holds, const std::string& sentence) {
  if (!holds) throw reef::ConfigError(sentence);
}

reef::Stage stage_of(const std::string& name) {
  const char* const names[] = {"replicate", "optimizer", "gradients", "parameters"};
  for (int stage = 0; stage < 4; ++stage) {
    if (name == names[stage] || name == std::to_string(stage)) return static_cast<reef::Stage>(stage);
  }
  throw reef::ConfigError("--stage '" + name +
                          "' is not known: use replicate, optimizer, gradients or parameters, or 0 to 3");
}

void check(const Options& options, const po::variables_map& given) {
  for (const char* name : {"width", "depth", "heads", "context", "batch", "steps", "threads", "eval-every",
                           "save-every", "pipeline", "replicas"}) {
    if (!given.count(name)) continue;
    const auto value = given[name].as<std::int64_t>();
    require(value >= 1 && value < std::int64_t{1} << 31,
            std::string("--") + name + " must be from 1 to 2147483647, not " + std::to_string(value));
  }
  for (const char* name : {"seed", "sample"}) {
    require(given[name].as<std::int64_t>() >= 0, std::string("--") + name + " must not be negative");
  }
  require(options.width % options.heads == 0,
          "--width " + std::to_string(options.width) + " cannot be divided among --heads " +
              std::to_string(options.heads) + ": make --width a multiple of --heads");
  require(options.optimizer == "adamw" || options.optimizer == "sgd",
          "--optimizer '" + options.optimizer + "' is not known: use adamw or sgd");
  if (!options.state.empty()) reef::optim::state_format(options.state);
  require(std::isfinite(options.learning_rate) && options.learning_rate > 0,
          "--learning-rate must be a number above 0");
  require(options.save_every == 0 || !options.save.empty(),
          "--save-every needs --save FILE to say where the checkpoint goes");
  require(options.spill.empty() || options.budget_bytes,
          "--spill says where a --budget's pages go: give both");
  require(!options.budget_bytes || options.save_every == 0,
          "--save-every reads all parameters at once, which a --budget need not hold: leave one out");
  require(options.pipeline > 0 || (options.schedule.empty() && options.replicas == 1),
          "--schedule and --replicas are of a pipeline: give --pipeline COUNT, too");
  require(options.pipeline == 0 || options.batch % options.pipeline == 0,
          "--batch " + std::to_string(options.batch) + " cannot be cut into --pipeline " +
              std::to_string(options.pipeline) + " micro-batches: make it a multiple");
  require(options.pipeline <= 128, "--pipeline must be 128 at most, of which validation has windows");
  require(options.pipeline == 0 || !options.recompute_within_bytes,
          "--recompute-within plans all blocks on one rank: leave it out with --pipeline");
  require(options.pipeline == 0 || options.compression == reef::Compression::kNone,
          "--compression is not for the gradients of a --pipeline: leave one out");
  require(options.ledger || (given["chart"].defaulted() && options.trace.empty()),
          "--chart and --trace show what the ledger counts: leave out --no-ledger");
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv) {
  Options options;
  const auto description = describe(options);
  po::variables_map given;
  try {
    using namespace po::command_line_style;
    const auto parsed = po::command_line_parser(argc, argv)
                            .options(description)
                            .positional({})  // so that a stray word is an error
                            .style(allow_long | long_allow_adjacent | long_allow_next)
                            .run();
    po::store(parsed, given);
    if (given.count("help")) {
      std::cout << description;
      return std::nullopt;
    }
    po::notify(given);
  } catch (const po::error& error) {
    throw reef::ConfigError(std::string(error.what()) + "; bytelm --help lists the options");
  }
  options.ledger = !given.count("no-ledger");
  if (given.count("budget")) options.budget_bytes = reef::parse_bytes(given["budget"].as<std::string>());
  if (given.count("recompute-within"))
    options.recompute_within_bytes = reef::parse_bytes(given["recompute-within"].as<std::string>());
  if (given.count("stage")) options.stage = stage_of(given["stage"].as<std::string>());
  if (given.count("compression"))
    options.compression = reef::compression_named(given["compression"].as<std::string>());
  if (given.count("density")) options.compression_options.density = given["density"].as<double>();
  reef::check_compression(options.compression, options.compression_options);
  check(options, given);
  return options;
}

c10::Device find_device(const std::string& text, int local_rank) {
  if (text == "cpu") return c10::kCPU;
  const bool this_rank = text == "cuda";
  const std::string digits = text.starts_with("cuda:") ? text.substr(5) : "";
  const bool numbered =
      !digits.empty() && digits.size() <= 3 && digits.find_first_not_of("0123456789") == std::string::npos;
  require(this_rank || numbered, "--device '" + text + "' is not known: use cpu, cuda or cuda:N");
  const int index = this_rank ? local_rank : std::stoi(digits);
  const int count = torch::cuda::is_available() ? torch::cuda::device_count() : 0;
  require(index < count,
          "--device " + text + " needs CUDA device " + std::to_string(index) + ", but " +
              std::to_string(count) +
              " are usable here: use --device cpu, or check the driver and CUDA_VISIBLE_DEVICES");
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

}  // namespace bytelm

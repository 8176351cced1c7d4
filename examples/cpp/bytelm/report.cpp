#include "report.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <iostream>
#include <numbers>

#include "reef/bytes.h"

namespace bytelm {

Report::Report(const Options& options, int rank, int ranks, std::int64_t first_step)
    : speaks_(rank == 0),
      shows_bar_(speaks_ && ::isatty(STDERR_FILENO) == 1),
      first_step_(first_step),
      steps_(options.steps),
      tokens_per_step_(options.batch * options.context * ranks),
      log_(speaks_ || options.losses.empty() ? options.losses
                                             : options.losses + ".rank" + std::to_string(rank)),
      step_(first_step) {}

void Report::say(const std::string& text) {
  clear_bar();
  if (speaks_) std::cout << text << std::endl;
}

void Report::step_begins() { begin_ = std::chrono::steady_clock::now(); }

void Report::step_ends(std::int64_t step, double nats, std::optional<std::int64_t> bytes_alive) {
  seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count();
  step_ = step;
  bits_per_byte_ = nats / std::numbers::ln2;
  bytes_alive_ = bytes_alive;
  log_.step(step, nats);
  draw_bar();
}

double Report::tokens_per_second() const {
  return seconds_ == 0 ? 0 : static_cast<double>(tokens_per_step_ * (step_ - first_step_)) / seconds_;
}

std::string Report::progress() const {
  const double seconds_per_step = seconds_ / static_cast<double>(step_ - first_step_);
  const auto left = std::lround(seconds_per_step * static_cast<double>(steps_ - step_));
  const std::string alive = bytes_alive_ ? ", " + reef::format_bytes(*bytes_alive_) + " alive" : "";
  char text[160];
  std::snprintf(text, sizeof text, "loss %.3f bits/byte, %.0f tokens/s%s, %ld:%02ld left", bits_per_byte_,
                static_cast<double>(tokens_per_step_) / seconds_per_step, alive.c_str(), left / 60,
                left % 60);
  return text;
}

void Report::draw_bar() {
  const auto now = std::chrono::steady_clock::now();
  const bool drawn_just_now = bar_visible_ && now - bar_drawn_ < std::chrono::milliseconds(100);
  if (!shows_bar_ || drawn_just_now) return;
  constexpr std::int64_t kCells = 20;
  const auto full = static_cast<std::size_t>(kCells * step_ / steps_);
  std::cerr << "\r\033[K[" << std::string(full, '#') << std::string(kCells - full, '.') << "] " << step_
            << "/" << steps_ << "  " << progress() << std::flush;
  bar_visible_ = true;
  bar_drawn_ = now;
}

void Report::clear_bar() {
  if (bar_visible_) std::cerr << "\r\033[K" << std::flush;
  bar_visible_ = false;
}

}  // namespace bytelm

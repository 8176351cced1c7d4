#include "distributed/gloo.h"

#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>

#include <memory>
#include <set>
#include <sstream>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>

#include "distributed/process.h"
#include "distributed/sigpipe.h"
#include "reef/error.h"

namespace reef {
namespace {

using Gloo = c10d::ProcessGroupGloo;

std::string interface_names() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return "none";
  std::set<std::string> names;
  for (const auto* each = list; each != nullptr; each = each->ifa_next) names.insert(each->ifa_name);
  ::freeifaddrs(list);
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

std::string next_step() {
  return "; set ProcessGroupOptions::interface to the network that the ranks share (this host has " +
         interface_names() + ").";
}

/// True if `host` resolves first to an address that other hosts cannot reach (Debian maps the host name to
/// 127.0.1.1).
bool is_loopback(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(found, &::freeaddrinfo);
  if (found->ai_family == AF_INET6) {
    return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(found->ai_addr)->sin6_addr);
  }
  const auto address = ntohl(reinterpret_cast<const sockaddr_in*>(found->ai_addr)->sin_addr.s_addr);
  return address >> 24 == IN_LOOPBACKNET;
}

template <class Create>
auto device(const std::string& what, Create create) {
  try {
    return create();
  } catch (const std::exception& error) {
    throw ConfigError("gloo cannot listen on " + what + ": " + message_of(error) + next_step());
  }
}

void add_devices(Gloo::Options& options, const GlooNetwork& network) {
  std::istringstream names(network.interface);
  for (std::string name; std::getline(names, name, ',');) {
    options.devices.push_back(
        device("interface '" + name + "'", [&] { return Gloo::createDeviceForInterface(name); }));
  }
  if (!options.devices.empty()) return;
  const auto host = network.one_machine ? std::string("127.0.0.1") : Process::self().host;
  if (!network.one_machine && is_loopback(host)) {
    throw ConfigError("the host name '" + host +
                      "' is a loopback address, which ranks on other hosts cannot reach" + next_step());
  }
  options.devices.push_back(device("'" + host + "'", [&] { return Gloo::createDeviceForHostname(host); }));
}

/// Python wraps it where TORCH_DISTRIBUTED_DEBUG is DETAIL.
c10::intrusive_ptr<Gloo::Options> options_of(c10d::Backend& backend) {
  if (auto* const wrapper = dynamic_cast<c10d::ProcessGroupWrapper*>(&backend))
    return options_of(*wrapper->getWrappedPg());
  if (auto* const gloo = dynamic_cast<Gloo*>(&backend)) return gloo->getOptions();
  throw ConfigError("a backend calls itself gloo, but is not LibTorch's: make the group with its own.");
}

}  // namespace

// Messages between two ranks keep the timeout of the connecting: it cannot be set afterwards.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const StorePtr& store, int rank, int world_size,
                                                    const GlooNetwork& network, milliseconds timeout) {
  const SigpipeBlocked on_gloos_threads;
  auto options = Gloo::Options::create(timeout);
  add_devices(*options, network);
  return c10::make_intrusive<Gloo>(store, rank, world_size, options);
}

c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const StorePtr& store, int rank, int world_size,
                                                    c10d::Backend& other) {
  const SigpipeBlocked on_gloos_threads;
  const auto options_of_other = options_of(other);
  auto options = Gloo::Options::create(options_of_other->timeout);
  options->devices = options_of_other->devices;
  options->threads = options_of_other->threads;
  return c10::make_intrusive<Gloo>(store, rank, world_size, options);
}

milliseconds timeout_of_gloo(c10d::Backend& backend) { return options_of(backend)->timeout; }

}  // namespace reef

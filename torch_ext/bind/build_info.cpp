#include "reef/build_info.h"

#include <torch/library.h>

TORCH_LIBRARY_FRAGMENT(reef, m) {
  m.def("build_info() -> Dict(str, str)", [] {
    const reef::BuildInfo info = reef::build_info();
    c10::Dict<std::string, std::string> facts;
    facts.insert("version", info.version);
    facts.insert("git_commit", info.git_commit);
    facts.insert("built_torch", info.built_torch);
    facts.insert("built_cuda", info.built_cuda);
    facts.insert("cuda_archs", info.cuda_archs);
    facts.insert("compiler", info.compiler);
    facts.insert("loaded_torch", info.loaded_torch);
    return facts;
  });
}

// Limits what libllama does for a grammar in GBNF; see grammar_guard.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ggpipe {

// As in libllama's llama-grammar.h and llama-sampler.cpp, of the version that the package depends on.
struct Element {
    uint32_t type, value;
};
using Rules = std::vector<std::vector<Element>>;
using Stack = std::vector<const Element *>;
using Stacks = std::vector<Stack>;
struct Sampler {
    const void * functions;
    struct {
        const void * vocab;
        std::string text, root;
        void * grammar;
    } * context;
};

class GrammarGuard {
public:
    // pieces: spelling of each token. rules, stacks: addresses of llama_grammar_get_rules and llama_grammar_get_stacks.
    GrammarGuard(const std::vector<std::string> & pieces, uintptr_t rules, uintptr_t stacks);
    // sampler: address of a grammar's sampler. False: it would take more steps.
    bool can_try(uintptr_t sampler, const int32_t * ids, size_t n, size_t steps) const;
    bool can_accept(uintptr_t sampler, int32_t id, size_t steps) const;

private:
    void * grammar(uintptr_t sampler) const;
    const Rules & (*rules)(const void *);
    Stacks & (*stacks)(void *);
    std::vector<std::vector<uint32_t>> tokens;  // characters, by token
};

}  // namespace ggpipe

// Whether libllama can follow a grammar in GBNF through some tokens within a limit of steps. It keeps a stack for each
// way to read the text so far, and their number may grow exponentially with each character; it has no limit of its own.
#include "grammar_guard.h"

#include <algorithm>
#include <set>

namespace ggpipe {

namespace {

enum Type : uint32_t { END, ALT, RULE_REF, CHAR, CHAR_NOT, CHAR_RNG_UPPER, CHAR_ALT, CHAR_ANY, TOKEN, TOKEN_NOT };

constexpr uint32_t ANY = UINT32_MAX;  // the rest of a character of which the token before has the first bytes

bool ends(const Element * at) { return at->type == END || at->type == ALT; }

// The element after a class of characters, and whether the class has this one.
std::pair<bool, const Element *> match(const Element * at, uint32_t c) {
    const bool is_positive = at->type != CHAR_NOT;
    bool found = at->type == CHAR_ANY;
    do {
        if (at[1].type == CHAR_RNG_UPPER) {
            found = found || (at->value <= c && c <= at[1].value);
            at += 2;
        } else {
            found = found || at->value == c;
            at += 1;
        }
    } while (at->type == CHAR_ALT);
    return {found == is_positive || c == ANY, at};
}

// Characters of a token, as far as they are whole.
std::vector<uint32_t> characters(const std::string & text) {
    std::vector<uint32_t> found;
    for (size_t i = 0; i < text.size();) {
        const auto byte = (unsigned char) text[i];
        const size_t n = byte < 0x80 ? 1 : byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : 2;
        if (byte >= 0x80 && byte < 0xc0) {
            if (found.empty()) found.push_back(ANY);
            ++i;
            continue;
        }
        if (i + n > text.size()) break;
        uint32_t c = n == 1 ? byte : byte & (0x7fu >> n);
        for (size_t j = 1; j < n; ++j) c = c << 6 | ((unsigned char) text[i + j] & 0x3f);
        found.push_back(c);
        i += n;
    }
    return found;
}

Stack after(const Stack & stack, const Element * next) {
    Stack found(stack.begin(), stack.end() - 1);
    if (!ends(next)) found.push_back(next);
    return found;
}

struct Walk {
    const Rules & rules;
    size_t left;  // steps

    // All stacks that a stack leads to before a character is read. False: too many steps.
    bool expand(Stack first, std::set<Stack> & found) {
        std::vector<Stack> waiting{std::move(first)};
        std::set<Stack> seen;
        while (!waiting.empty()) {
            if (left-- == 0) return left = 0, false;
            auto [it, is_new] = seen.insert(std::move(waiting.back()));
            waiting.pop_back();
            if (!is_new) continue;
            if (it->empty() || it->back()->type != RULE_REF) {
                found.insert(*it);
                continue;
            }
            const Element * at = rules[it->back()->value].data();
            while (true) {
                Stack next = after(*it, it->back() + 1);
                if (!ends(at)) next.push_back(at);
                waiting.push_back(std::move(next));
                while (!ends(at)) ++at;
                if (at++->type == END) break;
            }
        }
        return true;
    }

    // As libllama looks for tokens that do not fit: each stack on its own, with all tokens that it can read.
    bool try_tokens(const std::vector<const std::vector<uint32_t> *> & tokens, size_t depth, const Stack & stack) {
        if (stack.empty() || stack.back()->type >= TOKEN) return true;
        std::vector<const std::vector<uint32_t> *> longer;
        const Element * next = nullptr;
        for (auto token : tokens) {
            auto [fits, behind] = match(stack.back(), (*token)[depth]);
            next = behind;
            if (fits && depth + 1 < token->size()) longer.push_back(token);
        }
        if (longer.empty()) return true;
        std::set<Stack> stacks;
        if (!expand(after(stack, next), stacks)) return false;
        for (const auto & own : stacks) {
            if (!try_tokens(longer, depth + 1, own)) return false;
        }
        return true;
    }
};

}  // namespace

GrammarGuard::GrammarGuard(const std::vector<std::string> & pieces, uintptr_t rules, uintptr_t stacks)
    : rules((const Rules & (*) (const void *)) rules), stacks((Stacks & (*) (void *)) stacks) {
    for (const auto & piece : pieces) tokens.push_back(characters(piece));
}

void * GrammarGuard::grammar(uintptr_t sampler) const { return ((const Sampler *) sampler)->context->grammar; }

bool GrammarGuard::can_try(uintptr_t sampler, const int32_t * ids, size_t n, size_t steps) const {
    void * own = grammar(sampler);
    std::vector<const std::vector<uint32_t> *> given;
    for (size_t i = 0; i < n; ++i) {
        const auto & token = tokens.at((size_t) ids[i]);
        if (token.size() > 1) given.push_back(&token);
    }
    Walk walk{rules(own), steps};
    const auto & first = stacks(own);
    return std::all_of(first.begin(), first.end(), [&](const Stack & stack) { return walk.try_tokens(given, 0, stack); });
}

bool GrammarGuard::can_accept(uintptr_t sampler, int32_t id, size_t steps) const {
    void * own = grammar(sampler);
    Walk walk{rules(own), steps};
    const auto & first = stacks(own);
    std::set<Stack> now(first.begin(), first.end());
    for (uint32_t c : tokens.at((size_t) id)) {
        std::set<Stack> then;
        for (const auto & stack : now) {
            if (stack.empty() || stack.back()->type >= TOKEN) continue;
            auto [fits, next] = match(stack.back(), c);
            if (fits && !walk.expand(after(stack, next), then)) return false;
        }
        now = std::move(then);
    }
    return true;
}

}  // namespace ggpipe

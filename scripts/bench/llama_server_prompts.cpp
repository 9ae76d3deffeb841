// Renders conversations with llama-server's own function. Arguments: a file with a list of bodies of /apply-template,
// and templates. Prints a line for each template: a list of {"prompt": ...} or {"error": ...}.
#include "server-common.h"

#include <ctime>
#include <fstream>
#include <iostream>
#include <iterator>

static const std::time_t now = 1754049600;  // 2025-08-01 12:00 UTC

// The libraries call these, so that a template which writes the date writes the same one every day.
extern "C" std::time_t time(std::time_t * where) {
    return where ? *where = now : now;
}

std::chrono::system_clock::time_point std::chrono::system_clock::now() noexcept {
    return from_time_t(::now);
}

static std::string content_of(const char * path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// As llama-server has them without further flags.
static server_chat_params options_with(const std::string & source) {
    server_chat_params options{};
    options.use_jinja = options.prefill_assistant = true;
    options.reasoning_format = COMMON_REASONING_FORMAT_DEEPSEEK;
    options.tmpls = common_chat_templates_init(nullptr, source, "<s>", "</s>");
    options.enable_thinking = common_chat_templates_support_enable_thinking(options.tmpls.get());
    return options;
}

static json rendered(json body, const server_chat_params & options) {
    json found = json::object();
    std::vector<raw_buffer> files;
    try {
        found["prompt"] = oaicompat_chat_params_parse(body, options, files).at("prompt");
    } catch (const std::exception & e) {
        found["error"] = std::string(e.what());
    }
    return found;
}

int main(int n, char ** arguments) {
    common_log_set_verbosity_thold(-1);
    const json bodies = json::parse(content_of(arguments[1]));
    for (int i = 2; i < n; i++) {
        const server_chat_params options = options_with(content_of(arguments[i]));
        json found = json::array();
        for (const auto & body : bodies) {
            found.push_back(rendered(json::parse(body.dump()), options));
        }
        std::cout << found.dump() << std::endl;
    }
}

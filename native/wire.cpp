// What crosses a cut, packed: for each tensor a 16-byte head (name size, occurrence, data size), the name, and
// the data, both padded to 8 bytes. A name can cross more than once in a graph, so the n-th of a name in is
// matched with the n-th of that name out. Both sides run the same graph: names and order agree.
#include <algorithm>
#include <cstring>

#include "stage.h"

namespace ggpipe {

namespace {
struct Head { uint32_t name_size, occurrence; uint64_t size; };
size_t padded(size_t n) { return (n + 7) & ~size_t(7); }
}  // namespace

void Wire::begin(const uint8_t * incoming, size_t size, size_t headroom) {
    in_.clear();
    wanted.clear();
    produced.clear();
    out.assign(headroom, 0);
    for (size_t at = 0; at + sizeof(Head) <= size;) {
        Head head;
        memcpy(&head, incoming + at, sizeof head);
        const size_t name_at = at + sizeof head, data_at = name_at + padded(head.name_size);
        if (head.size > size || data_at + head.size > size) break;  // cut short: shows up as missing
        in_.push_back({(const char *) incoming + name_at, head.name_size, incoming + data_at, head.size, false});
        at = data_at + padded(head.size);
    }
}

void Wire::put(const char * copy_name, const void * data, size_t size) {
    std::string name = copy_name;  // "<backend>#<tensor>#<copy>"
    name = name.substr(name.find('#') + 1);
    name = name.substr(0, name.rfind('#'));
    const Head head = {uint32_t(name.size()), uint32_t(std::count(produced.begin(), produced.end(), name)), size};
    const size_t at = out.size(), data_at = at + sizeof head + padded(name.size());
    out.resize(data_at + padded(size));
    memcpy(out.data() + at, &head, sizeof head);
    memcpy(out.data() + at + sizeof head, name.data(), name.size());
    memcpy(out.data() + data_at, data, size);
    produced.push_back(std::move(name));
}

bool Wire::take(const char * name, void * data, size_t size) {
    wanted.emplace_back(name);
    const size_t n = strlen(name);
    for (Frame & f : in_) {
        if (f.used || f.name_size != n || memcmp(f.name, name, n) != 0) continue;
        f.used = true;
        if (f.size != size) return false;
        memcpy(data, f.data, size);
        return true;
    }
    return false;
}

}  // namespace ggpipe

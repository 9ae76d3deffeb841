// What crosses a cut, packed: for each tensor a head of two 8-byte numbers (bytes of its name, bytes of its data), the name,
// and the data, both padded to 8 bytes. The next layer may read a result in several shapes, which are tensors of their own with
// the same data: these cross once, and later heads have the number of that tensor instead. A name can cross more than once in a
// graph, so the n-th of a name in is matched with the n-th of that name out. Both sides run the same graph: names and order agree,
// but not the places of nodes.
#include <algorithm>
#include <cstring>

#include "stage.h"

namespace ggpipe {

namespace {
struct Head { uint64_t name_size, size; };
constexpr uint64_t kSame = uint64_t(1) << 63;  // in `size`: no data follow; they are those of the tensor whose number the other bits are
size_t padded(size_t n) { return (n + 7) & ~size_t(7); }
// ggml names a nameless result by its place in the graph, which has more nodes where a draft head's states are made.
std::string without_place(std::string name) {
    constexpr std::string_view kNameless = "node_";
    return name.compare(0, kNameless.size(), kNameless) ? name : std::string(kNameless);
}
}  // namespace

void Wire::begin(const uint8_t * incoming, size_t size, size_t headroom) {
    in_.clear();
    wanted.clear();
    wanted_rows.clear();
    produced.clear();
    sent_.clear();
    out.assign(headroom, 0);
    for (size_t at = 0; at + sizeof(Head) <= size;) {
        Head head;
        memcpy(&head, incoming + at, sizeof head);
        const size_t name_at = at + sizeof head, left = size - name_at;
        const std::string_view name = {(const char *) incoming + name_at, std::min<size_t>(head.name_size, left)};
        if (head.size & kSame) {
            const size_t number = head.size & ~kSame;
            if (number >= in_.size() || head.name_size > left) break;
            in_.push_back({name, in_[number].data, in_[number].size});
            at = name_at + padded(head.name_size);
            continue;
        }
        if (head.name_size > left || head.size > left || padded(head.name_size) + head.size > left) break;  // cut short: it is missing
        const uint8_t * data = incoming + name_at + padded(head.name_size);
        in_.push_back({name, data, head.size});
        at = data - incoming + padded(head.size);
    }
}

void Wire::put(const char * copy_name, const void * data, size_t size) {
    std::string name = copy_name;  // "<backend>#<tensor>#<copy>"
    name = name.substr(name.find('#') + 1);
    name = without_place(name.substr(0, name.rfind('#')));
    const auto same = std::find_if(sent_.begin(), sent_.end(), [&](const auto & sent) {
        return sent.second == size && !memcmp(out.data() + sent.first, data, size);
    });
    const bool is_new = same == sent_.end();
    const Head head = {name.size(), is_new ? size : kSame | size_t(same - sent_.begin())};
    const size_t at = out.size(), data_at = at + sizeof head + padded(name.size());
    out.resize(data_at + (is_new ? padded(size) : 0));
    memcpy(out.data() + at, &head, sizeof head);
    memcpy(out.data() + at + sizeof head, name.data(), name.size());
    if (is_new) memcpy(out.data() + data_at, data, size);
    sent_.emplace_back(is_new ? data_at : same->first, size);
    produced.push_back(std::move(name));
}

bool Wire::take(const char * tensor, void * data, size_t size, size_t row) {
    const std::string & name = wanted.emplace_back(without_place(tensor));
    wanted_rows.push_back(row);
    const auto found = std::find_if(in_.begin(), in_.end(), [&](const Frame & f) { return f.name == name; });
    if (found == in_.end()) return false;
    const Frame frame = *found;
    in_.erase(found);
    if (frame.size == size) memcpy(data, frame.data, size);
    return frame.size == size;
}

}  // namespace ggpipe

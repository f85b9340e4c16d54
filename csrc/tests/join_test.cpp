#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <string>

#include "data/join/joiner.h"
#include "tests/check.h"

using namespace shoal::join;

namespace {

struct Folder {
  std::filesystem::path path;
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "shoal-join-XXXXXX").string();
    CHECK(::mkdtemp(name.data()) != nullptr);
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

Fields fields(bool actions) {
  Fields out;
  out.key = {"id"};
  out.time = "t";
  if (actions) out.kind = "kind", out.value = "v";
  out.per_second = 1e6;
  return out;
}

Settings settings(int64_t block) {
  Settings out;
  out.window = 20;
  out.lateness[0] = out.lateness[1] = 10;
  out.block = block;
  out.fields[0] = fields(false), out.fields[1] = fields(true);
  out.labels = {{"y", Rule::any, {"click"}}, {"n", Rule::sum, {}}};
  return out;
}

// One message of a random side: 0 or 1, and its text.
std::pair<int, std::string> random_message(std::mt19937& random, int64_t now) {
  const int side = random() % 2;
  const std::string id = std::to_string(random() % 12),
                    time = std::to_string(now + static_cast<int64_t>(random() % 15));
  if (side == 0)
    return {0, "{\"id\":\"" + id + "\",\"t\":" + time + ",\"x\":\"" + std::string(random() % 90, 'x') + "\"}"};
  return {1, "{\"id\":" + id + ",\"t\":" + time + ",\"kind\":\"" + (random() % 2 ? "click" : "see") + "\",\"v\":2}"};
}

bool offer(Joiner& joiner, int side, const std::string& text, const std::string& position) {
  const bool good = joiner.read(side, {text}, int64_t{1} << 59).empty();
  joiner.accept(position);
  return good;
}

void drain(Joiner& joiner, std::string* out) {
  bool more = true;
  while (more) {
    more = joiner.run(500);
    const Joiner::Samples samples = joiner.take();
    out->append(samples.bytes);
  }
}

TEST(an_index_finds_what_was_put_into_it) {
  std::mt19937_64 random(1);
  KeyIndex index;
  std::multimap<uint64_t, uint64_t> expected;
  for (int step = 0; step < 60000; ++step) {
    const bool growing = (step / 15000) % 2 == 0;
    const uint64_t hash = (random() % 3 == 0) ? random() % 50 : random() << 40 | random() % 4;
    if (random() % 4 < (growing ? 3u : 1u)) {
      const Location at = Location::of(random() % 2, random() % 1000, random() % 100000);
      if (index.find(hash, at) != nullptr) continue;
      index.insert(hash, at);
      expected.emplace(hash + (hash == 0), at.bits);
    } else if (!expected.empty()) {
      auto it = expected.lower_bound(random());
      if (it == expected.end()) it = expected.begin();
      CHECK(index.erase(it->first, Location{it->second}));
      CHECK(!index.erase(it->first, Location{it->second}));
      expected.erase(it);
    }
    std::multiset<uint64_t> found, wanted;
    index.find(hash, [&](Location at) { found.insert(at.bits); });
    const auto [begin, end] = expected.equal_range(hash + (hash == 0));
    for (auto it = begin; it != end; ++it) wanted.insert(it->second);
    CHECK(found == wanted);
    CHECK(index.size() == static_cast<int64_t>(expected.size()));
  }
}

TEST(any_bytes_are_read_without_harm) {
  std::mt19937 random(2);
  const std::string letters = "{}[]\":,\\ut0idkv1-e.\n \xff";
  Message message;
  std::string why;
  Fields text = fields(true);
  text.coding = Coding::text, text.key_columns = {1}, text.time_column = 0, text.kind_column = 2;
  int good = 0;
  for (int round = 0; round < 30000; ++round) {
    std::string given = round % 2 ? "{\"id\":\"a\",\"t\":1,\"kind\":\"k\\\"\",\"v\":-1.5e2}" : "";
    for (size_t n = random() % 8; n > 0; --n) {
      if (given.empty() || random() % 3 == 0)
        given.insert(random() % (given.size() + 1), 1, letters[random() % letters.size()]);
      else
        given[random() % given.size()] = letters[random() % letters.size()];
    }
    good += read_message(round % 5 ? fields(true) : text, given, &message, &why);
    int64_t time;
    read_iso_time(given, &time);
  }
  CHECK(good > 300);
  int64_t time;
  CHECK(read_iso_time("1970-01-02", &time) && time == int64_t{86400} * 1000000);
  CHECK(read_iso_time("2026-11-01T12:00:00.25+02:00", &time) && time == int64_t{1793527200} * 1000000 + 250000);
  CHECK(!read_iso_time("2026-11-01T12", &time) && !read_iso_time("2026-11-01T12:00:00Zx", &time));
}

TEST(segments_restarts_and_memory_change_nothing) {
  for (const bool early : {false, true}) {
    for (int seed = 0; seed < 6; ++seed) {
      std::string expected;
      std::array<int64_t, kCounters> counters{};
      for (const int64_t block : {int64_t{1} << 20, int64_t{200}, int64_t{2000}}) {
        Folder folder;
        Settings own = settings(block);
        own.close_on_action = early;
        own.keep_negatives = 0.7;
        auto joiner = std::make_unique<Joiner>(own, folder.path.string());
        std::mt19937 random(seed);
        std::string out;
        const std::string tail = (folder.path / "tail").string();
        joiner->open_tail(tail, 0, false);
        std::map<std::string, int64_t> state;
        std::vector<uint64_t> live;
        std::array<std::string, 2> positions;
        size_t written = 0;
        bool saved = false;
        for (int64_t step = 0; step < 300; ++step) {
          const auto [side, text] = random_message(random, step / 4);
          CHECK(offer(*joiner, side, text, std::to_string(step)));
          drain(*joiner, &out);
          if (block == 2000 && step % 37 == 0) {
            joiner->seal();
            state = joiner->state();
            live.clear();
            for (const Segment* one : joiner->live()) live.push_back(one->number);
            positions = {joiner->position(0), joiner->position(1)};
            joiner->open_tail(tail, 0, false);
            written = out.size();
            saved = true;
          }
          if (block == 2000 && saved && step % 23 == 0) {  // a crash: later messages are read from the tail
            out.resize(written);
            joiner = std::make_unique<Joiner>(own, folder.path.string());
            joiner->restore(state, live, positions);
            int64_t torn = 0;
            const auto take = [&] { out.append(joiner->take().bytes); };
            const int64_t end = joiner->replay(tail, 300, take, &torn);
            take();
            CHECK(torn == 0);
            joiner->open_tail(tail, end, false);
          }
        }
        for (int side : {0, 1}) joiner->advance(side, kForever, "");
        drain(*joiner, &out);
        CHECK(joiner->open_impressions() == 0 && joiner->waiting_actions() == 0 && joiner->spilled() == 0);
        if (expected.empty()) {
          expected = out;
          for (int c = 0; c < kCounters; ++c) counters[c] = joiner->counter(c);
        }
        CHECK(out == expected);
        for (int c = 0; c < kCounters; ++c) CHECK(counters[c] == joiner->counter(c));
      }
    }
  }
}

TEST(damage_is_noticed_wherever_it_is) {
  Folder folder;
  {
    Joiner joiner(settings(0), folder.path.string());
    for (int i = 0; i < 20; ++i) {
      offer(joiner, 0, "{\"id\":" + std::to_string(i) + ",\"t\":" + std::to_string(i) + "}", "");
      joiner.run(1 << 20);
    }
    joiner.seal();
  }
  const auto path = folder.path / "segment-0000000000.seg";
  std::ifstream in(path, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  CHECK(whole.size() > 500);
  std::map<std::string, int64_t> state;
  {
    Joiner empty(settings(0), folder.path.string());
    state = empty.state();
  }
  for (size_t at = 0; at <= whole.size(); ++at) {
    std::string damaged = whole;
    if (at < whole.size())
      damaged[at] ^= 4;
    else
      damaged.resize(whole.size() - 8);
    std::ofstream(path, std::ios::binary) << damaged;
    Joiner joiner(settings(0), folder.path.string());
    if (at >= 28 && at < 32) continue;  // zeros that nobody reads
    CHECK_THROWS(joiner.restore(state, {0}, {}));
  }
}

}  // namespace

#include "data/join/segment.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "io/error.h"
#include "io/out_file.h"

namespace shoal::join {

namespace {

constexpr char kMagic[9] = "SHJOIN1\n";
constexpr size_t kOpenFiles = 48;
constexpr int64_t kFirstRead = 512;  // bytes to read of a record at first; most are smaller

struct FileHeader {
  char magic[8];
  uint64_t marks;
  int64_t keep_until;
  uint32_t crc;
  uint32_t zeros;
};
static_assert(sizeof(FileHeader) == 32);

uint32_t header_crc(const FileHeader& header, const std::vector<uint64_t>& marks) {
  const uint32_t crc = crc32c(&header, offsetof(FileHeader, crc));
  return crc32c_extend(crc, marks.data(), marks.size() * sizeof(uint64_t));
}

[[noreturn]] void damaged(const Segment& segment, int64_t at, const char* what) {
  throw DataError("segment " + segment.path + " is damaged at byte " + std::to_string(at) + ": " + what);
}

void put(OutFile& file, const void* data, size_t n) {
  const char* from = static_cast<const char*>(data);
  while (n > 0) {
    const size_t part = std::min<size_t>(n, 1 << 20);
    std::memcpy(file.room(part), from, part);
    file.used(part);
    from += part;
    n -= part;
  }
}

}  // namespace

Segments::~Segments() {
  for (const Open& one : open_) ::close(one.fd);
}

std::string Segments::path_of(uint64_t number) const {
  std::string digits = std::to_string(number);
  digits.insert(0, digits.size() < 10 ? 10 - digits.size() : 0, '0');
  return folder_ + "/segment-" + digits + ".seg";
}

Segment Segments::write(uint64_t number, int64_t keep_until, const std::vector<uint64_t>& marks,
                        const std::vector<const char*>& records, std::vector<int64_t>* places) {
  Segment out;
  out.number = number;
  out.path = path_of(number);
  out.keep_until = keep_until;
  const std::string temporary = out.path + "-tmp-0";
  ::unlink(temporary.c_str());  // a killed process may have left it
  OutFile file(temporary, false);
  FileHeader header{};
  std::memcpy(header.magic, kMagic, 8);
  header.marks = marks.size();
  header.keep_until = keep_until;
  header.crc = header_crc(header, marks);
  put(file, &header, sizeof header);
  put(file, marks.data(), marks.size() * sizeof(uint64_t));
  int64_t at = out.begin = static_cast<int64_t>(sizeof header + marks.size() * sizeof(uint64_t));
  places->clear();
  for (const char* record : records) {
    Header own;
    std::memcpy(&own, record, sizeof own);
    char* to = file.room(own.size);
    std::memcpy(to, record, own.size);
    own.crc = record_crc(to, own.size);
    std::memcpy(to, &own, sizeof own);
    file.used(own.size);
    places->push_back(at);
    at += own.size;
  }
  file.sync();
  file.rename_to(out.path);
  out.digest = file.digest();
  out.next = out.begin;
  return out;
}

Segment Segments::open(uint64_t number, std::vector<uint64_t>* marks) {
  Segment out;
  out.number = number;
  out.path = path_of(number);
  struct stat found;
  if (::stat(out.path.c_str(), &found) != 0) throw os_error(out.path);
  out.digest.bytes = found.st_size;
  FileHeader header;
  if (read_at(out, reinterpret_cast<char*>(&header), sizeof header, 0) != sizeof header ||
      std::memcmp(header.magic, kMagic, 8) != 0)
    damaged(out, 0, "it does not begin with a segment's header");
  if (header.marks > (static_cast<uint64_t>(found.st_size) - sizeof header) / sizeof(uint64_t))
    damaged(out, 8, "it is too short for its marks");
  marks->resize(header.marks);
  const size_t bytes = header.marks * sizeof(uint64_t);
  if (read_at(out, reinterpret_cast<char*>(marks->data()), bytes, sizeof header) != bytes)
    damaged(out, sizeof header, "it ends inside its marks");
  if (header_crc(header, *marks) != header.crc) damaged(out, 0, "the checksum of its header does not match");
  out.keep_until = header.keep_until;
  out.begin = out.next = static_cast<int64_t>(sizeof header + bytes);
  return out;
}

Record Segments::head(Segment& segment, int64_t want) {
  int64_t there = segment.buffered_at + segment.buffered - segment.next;
  bool whole = segment.next >= segment.buffered_at && there >= static_cast<int64_t>(sizeof(Header));
  if (whole) {
    Header header;
    std::memcpy(&header, segment.buffer.data() + (segment.next - segment.buffered_at), sizeof header);
    whole = header.size <= there;
    if (header.size > want && header.size <= kMaxRecord) want = header.size;
  }
  if (!whole) {
    while (true) {
      want = std::min((want + 7) / 8 * 8, segment.digest.bytes - segment.next);
      if (static_cast<int64_t>(segment.buffer.size()) != want) {
        segment.buffer = {};  // free it before the new one is allocated
        segment.buffer.resize(static_cast<size_t>(want));
      }
      segment.buffered_at = segment.next;
      segment.buffered =
          static_cast<int64_t>(read_at(segment, segment.buffer.data(), static_cast<size_t>(want), segment.next));
      there = segment.buffered;
      Header header{};
      if (there >= static_cast<int64_t>(sizeof header)) std::memcpy(&header, segment.buffer.data(), sizeof header);
      if (header.size <= there || header.size > kMaxRecord || there < want ||
          segment.next + want >= segment.digest.bytes)
        break;
      want = header.size;
    }
  }
  return checked(segment, segment.buffer.data() + (segment.next - segment.buffered_at), segment.next, there);
}

Record Segments::read(const Segment& segment, int64_t at, std::vector<char>* scratch) {
  const int64_t near = segment.buffered_at + segment.buffered - at;
  if (at >= segment.buffered_at && near >= static_cast<int64_t>(sizeof(Header))) {
    const char* data = segment.buffer.data() + (at - segment.buffered_at);
    if (Record(data).header().size <= near) return checked(segment, data, at, near);
  }
  scratch->resize(kFirstRead);
  int64_t there = static_cast<int64_t>(read_at(segment, scratch->data(), kFirstRead, at));
  Header header{};
  if (there >= static_cast<int64_t>(sizeof header)) std::memcpy(&header, scratch->data(), sizeof header);
  if (header.size > there && header.size <= kMaxRecord) {
    scratch->resize(header.size);
    there = static_cast<int64_t>(read_at(segment, scratch->data(), header.size, at));
  }
  return checked(segment, scratch->data(), at, there);
}

Record Segments::checked(const Segment& segment, const char* data, int64_t at, int64_t there) const {
  if (there < static_cast<int64_t>(sizeof(Header))) damaged(segment, at, "it ends inside a record");
  const Record record(data);
  if (!record.consistent()) damaged(segment, at, "the sizes of a record do not match");
  if (record.header().size > there) damaged(segment, at, "it ends inside a record");
  if (record_crc(data, record.header().size) != record.header().crc)
    damaged(segment, at, "the checksum of a record does not match");
  return record;
}

size_t Segments::read_at(const Segment& segment, char* to, size_t n, int64_t at) {
  const int fd = descriptor(segment);
  size_t done = 0;
  while (done < n) {
    const ssize_t got = ::pread(fd, to + done, n - done, at + static_cast<int64_t>(done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw os_error(segment.path);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  return done;
}

int Segments::descriptor(const Segment& segment) {
  for (Open& one : open_) {
    if (one.number == segment.number) {
      one.used = ++clock_;
      return one.fd;
    }
  }
  const int fd = ::open(segment.path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw os_error(segment.path);
  if (open_.size() >= kOpenFiles) {
    auto oldest = std::min_element(open_.begin(), open_.end(), [](auto& a, auto& b) { return a.used < b.used; });
    ::close(oldest->fd);
    *oldest = {segment.number, fd, ++clock_};
  } else {
    open_.push_back({segment.number, fd, ++clock_});
  }
  return fd;
}

void Segments::forget(const Segment& segment) {
  std::erase_if(open_, [&](const Open& one) {
    if (one.number != segment.number) return false;
    ::close(one.fd);
    return true;
  });
}

}  // namespace shoal::join

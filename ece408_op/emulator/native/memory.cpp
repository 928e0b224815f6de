// Memory: where an address lies, allocations with space around them, and what a GPU would refuse.
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>

#include "internal.h"

extern "C" char __executable_start[], _end[], __data_start[];
extern "C" __attribute__((weak)) char __start_ece408_constant[], __stop_ece408_constant[];

namespace emulator {

alignas(1024) unsigned char dynamic_shared[DYNAMIC_SHARED_BYTES];

namespace {

// Allocations lie far apart, so that an index that is too large or negative misses the neighbours.
constexpr size_t ARENA_BYTES = size_t(1) << 36, MOST_BYTES = size_t(4) << 30, GAP = 64 * 1024, UNIT = 4096;
uintptr_t arena, arena_used, taken;
uint32_t *unit_owner;  // by unit of the arena: 1 + the number of the allocation that it, or the gap around it, belongs to
std::vector<Allocation> allocations;
uintptr_t static_shared;
size_t static_bytes, dynamic_bytes;
std::vector<char> written;  // by byte of shared memory, in this block

// All variables that are `static thread_local` in the program are its static shared memory.
int find_shared(dl_phdr_info *info, size_t, void *) {
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_TLS && !static_shared)
            static_shared = uintptr_t(info->dlpi_tls_data), static_bytes = info->dlpi_phdr[i].p_memsz;
    return 1;  // the program itself is the first
}

// Addresses are reserved, memory is not. The host's code may take as much memory as the emulated GPU has.
void begin_arena() {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    arena = uintptr_t(mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0));
    void *const units = mmap(nullptr, ARENA_BYTES / UNIT * 4, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (arena == uintptr_t(MAP_FAILED) || units == MAP_FAILED) arena = 0;
    unit_owner = static_cast<uint32_t *>(units);
    arena_used = GAP;
    const rlimit most = {ARENA_BYTES + 2 * MOST_BYTES, ARENA_BYTES + 2 * MOST_BYTES};
    setrlimit(RLIMIT_AS, &most);
}

// Read the names and places of the arrays in shared memory from the program's own symbol table.
struct Variable { std::string name; size_t begin, bytes; };
std::vector<Variable> variables;
std::vector<short> variable_at;  // by byte of static shared memory; -1 where there is none, -2 for the compiler's own

void read_symbols() {
    variable_at.assign(static_bytes, -1);
    const int file = open("/proc/self/exe", O_RDONLY);
    struct stat status;
    if (file < 0 || fstat(file, &status)) return;
    const char *const image = static_cast<const char *>(mmap(nullptr, status.st_size, PROT_READ, MAP_PRIVATE, file, 0));
    const auto *const head = reinterpret_cast<const Elf64_Ehdr *>(image);
    const auto *const sections = reinterpret_cast<const Elf64_Shdr *>(image + head->e_shoff);
    for (int i = 0; i < head->e_shnum; i++) {
        if (sections[i].sh_type != SHT_SYMTAB) continue;
        const auto *const symbols = reinterpret_cast<const Elf64_Sym *>(image + sections[i].sh_offset);
        const char *const names = image + sections[sections[i].sh_link].sh_offset;
        for (size_t j = 0; j < sections[i].sh_size / sizeof *symbols; j++) {
            const Elf64_Sym &symbol = symbols[j];
            if (ELF64_ST_TYPE(symbol.st_info) != STT_TLS || symbol.st_value + symbol.st_size > static_bytes) continue;
            const std::string name = names + symbol.st_name;
            const bool guard = name.compare(0, 4, "_ZGV") == 0;
            for (size_t at = 0; at < symbol.st_size; at++)
                variable_at[symbol.st_value + at] = guard ? -2 : short(variables.size());
            if (!guard) variables.push_back({name, symbol.st_value, symbol.st_size});
        }
    }
    munmap(const_cast<char *>(image), status.st_size);
    close(file);
}

std::string bytes_text(long long n) { return std::to_string(n) + (n == 1 ? " byte" : " bytes"); }

}  // namespace

void *device_malloc(size_t bytes, bool host_may_use, size_t alignment) {
    if (!arena) begin_arena();
    if (bytes > MOST_BYTES || (taken += bytes) > MOST_BYTES || arena_used + bytes + 3 * GAP > ARENA_BYTES) return nullptr;
    const uintptr_t start = (arena + arena_used + UNIT - 1) / UNIT * UNIT;
    uintptr_t begin = start + GAP;  // a multiple of `alignment`, but not of twice as much
    if (alignment < 256) begin += alignment;
    const uintptr_t end = begin + bytes, next = (end + GAP + UNIT - 1) / UNIT * UNIT;
    allocations.push_back({begin, end, host_may_use, false, ""});
    for (uintptr_t unit = (start - arena) / UNIT; unit < (next - arena) / UNIT; unit++)
        unit_owner[unit] = allocations.size();
    std::memset(reinterpret_cast<void *>(begin - 4096), 0xff, bytes + 2 * 4096);  // NaN, around it too
    arena_used = next - arena;
    return reinterpret_cast<void *>(begin);
}

const Allocation *allocation_near(uintptr_t address) {
    if (!arena || address - arena >= ARENA_BYTES) return nullptr;
    const uint32_t owner = unit_owner[(address - arena) / UNIT];
    return owner ? &allocations[owner - 1] : nullptr;
}

bool device_free(void *address) {
    Allocation *const found = const_cast<Allocation *>(allocation_near(uintptr_t(address)));
    if (!found || found->begin != uintptr_t(address) || found->freed) return false;
    found->freed = true;
    taken -= found->end - found->begin;
    return true;
}

void name_allocation(void *address, const char *name) {
    Allocation *const found = const_cast<Allocation *>(allocation_near(uintptr_t(address)));
    if (found) std::snprintf(found->name, sizeof found->name, "%s", name);
}

// What was written close to an allocation by code that is not watched.
void check_surroundings() {
    for (const Allocation &each : allocations) {
        const auto *const begin = reinterpret_cast<const unsigned char *>(each.begin);
        const auto *const end = reinterpret_cast<const unsigned char *>(each.end);
        bool same = true;
        for (int i = 1; i <= 4096; i++) same &= begin[-i] == 0xff && end[i - 1] == 0xff;
        if (!same) report("out of bounds", (std::string("a write beyond ") + each.name).c_str(), nullptr);
    }
}

void misaligned() {
    report("misaligned", "a vector of 16 bytes at an address that is no multiple of 16, which a GPU refuses",
           __builtin_return_address(0));
}

bool is_device(const void *address) { return arena && uintptr_t(address) - arena < ARENA_BYTES; }

bool is_inside(const void *address, size_t bytes) {
    const Allocation *const found = allocation_near(uintptr_t(address));
    return found && !found->freed && uintptr_t(address) >= found->begin && uintptr_t(address) + bytes <= found->end;
}

Space space_of(uintptr_t address) {
    if (address - static_shared < static_bytes || address - uintptr_t(dynamic_shared) < DYNAMIC_SHARED_BYTES)
        return Space::SHARED;
    if (arena && address - arena < ARENA_BYTES) return Space::GLOBAL;
    if (address - threads[current].stack < STACK_BYTES) return Space::LOCAL;
    if (address >= uintptr_t(__start_ece408_constant) && address < uintptr_t(__stop_ece408_constant))
        return Space::CONSTANT;
    if (address >= uintptr_t(__executable_start) && address < uintptr_t(_end)) return Space::PROGRAM;
    return Space::HOST;
}

void check_global(uintptr_t address, int bytes, Operation operation, const void *code) {
    const Allocation *const found = allocation_near(address);
    const std::string verb = operation == READ ? "reads " : "writes ";
    if (found && !found->freed && address >= found->begin && address + bytes <= found->end) {
        if (address % bytes)
            report("misaligned", (verb + bytes_text(bytes) + " at an address that is no multiple of " +
                                  std::to_string(bytes) + ", which a GPU refuses").c_str(), code);
        return;
    }
    if (!found)
        return stop("out of bounds", (verb + bytes_text(bytes) + " at an address that belongs to no GPU memory").c_str(),
                    code);
    const std::string name = found->name[0] ? found->name : "an allocation of " + bytes_text(found->end - found->begin);
    if (found->freed) return report("out of bounds", (verb + name + " after cudaFree").c_str(), code);
    const long long behind = static_cast<long long>(address) - static_cast<long long>(found->end);
    const std::string place = address < found->begin ? bytes_text(found->begin - address) + " in front of "
                                                     : bytes_text(behind) + " behind the end of ";
    report("out of bounds", (verb + bytes_text(bytes) + " " + place + name).c_str(), code);
}

unsigned shared_address(const void *p) {
    const uintptr_t address = uintptr_t(p);
    return address - static_shared < static_bytes ? 0x80000000u + (address - static_shared)
                                                  : address - uintptr_t(dynamic_shared);
}
void *shared_pointer(unsigned address) {
    if (address & 0x80000000u) return reinterpret_cast<void *>(static_shared + (address - 0x80000000u));
    return dynamic_shared + address;
}

size_t shared_size() { return static_bytes + dynamic_bytes; }

uintptr_t shared_offset(uintptr_t address) {
    if (address - static_shared < static_bytes) return address - static_shared;
    return static_bytes + (address - uintptr_t(dynamic_shared));
}

void clear_shared(size_t bytes) {
    static bool known;
    if (!known) known = true, dl_iterate_phdr(find_shared, nullptr), read_symbols();
    dynamic_bytes = bytes;
    if (static_bytes) std::memset(reinterpret_cast<void *>(static_shared), 0xff, static_bytes);
    std::memset(dynamic_shared, 0xff, bytes);
    written.assign(shared_size(), 0);
}

// Returns false where the access is none of the block's shared memory.
bool check_shared(uintptr_t address, int bytes, Operation operation, const void *code) {
    const uintptr_t at = shared_offset(address);
    if (at < static_bytes && variable_at[at] == -2) return false;  // whether a variable is initialised: no GPU asks
    if (at + bytes > shared_size() || (at < static_bytes && variable_at[at] < 0)) {
        report("out of bounds", at < static_bytes ? "an index beyond an array in shared memory"
                                                  : "an index beyond the block's dynamic shared memory", code);
        return false;
    }
    if (address % bytes) report("misaligned", "an address of shared memory that is no multiple of its size", code);
    if (operation != WRITE)
        for (int i = 0; i < bytes; i++)
            if (!written[at + i]) {
                report("uninitialised", "reads shared memory that no thread of the block has written", code);
                break;
            }
    if (operation != READ) std::memset(&written[at], 1, bytes);
    return true;
}

}  // namespace emulator

// Memory: where an address lies, allocations with space around them, and what a GPU would refuse.
#include <cxxabi.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "internal.h"

extern "C" char __executable_start[], _end[], __data_start[];
extern "C" __attribute__((weak)) char __start_ece408_constant[], __stop_ece408_constant[];
extern "C" __attribute__((weak)) char __start_ece408_managed[], __stop_ece408_managed[];

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

// The program's variables, from its own symbol table, by address. _build.py put a gap in front of each, so an index beyond
// one of them hits none. Those in shared memory lie one after another from `offset` on, as on a GPU.
struct Variable {
    std::string name;
    uintptr_t begin, end;
    size_t offset;
    bool guard, used;  // `guard`: the compiler's own, whether a variable is initialised; `used` by this launch
    std::vector<GlobalWrite> writes;  // as an allocation's
    bool address_taken;               // by cudaGetSymbolAddress
};
std::vector<Variable> variables;
size_t all_static;  // bytes of shared memory that the variables take

std::string readable(const char *name) {
    char *const demangled = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
    std::string all = demangled ? demangled : name;
    std::free(demangled);
    return all.substr(all.rfind(':') + 1);
}

void read_symbols() {
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
            const int type = ELF64_ST_TYPE(symbol.st_info);
            const char *const name = names + symbol.st_name;
            const uintptr_t begin = symbol.st_value + (type == STT_TLS ? static_shared : 0);
            if ((type == STT_TLS || type == STT_OBJECT) && symbol.st_size)
                variables.push_back({readable(name), begin, begin + symbol.st_size, 0, !std::strncmp(name, "_ZGV", 4), false, {}, false});
        }
    }
    munmap(const_cast<char *>(image), status.st_size);
    close(file);
    std::sort(variables.begin(), variables.end(), [](const Variable &a, const Variable &b) { return a.begin < b.begin; });
    for (Variable &each : variables)
        if (each.begin - static_shared < static_bytes && !each.guard)
            each.offset = all_static, all_static += (each.end - each.begin + 127) / 128 * 128;
}

// The last variable that begins at or before an address; null where there is none.
Variable *variable_before(uintptr_t address) {
    static Variable *last;
    if (variables.empty()) dl_iterate_phdr(find_shared, nullptr), read_symbols();
    if (last && address - last->begin < last->end - last->begin) return last;
    const auto behind = std::upper_bound(variables.begin(), variables.end(), address,
                                         [](uintptr_t at, const Variable &each) { return at < each.begin; });
    return behind == variables.begin() ? nullptr : last = &*behind - 1;
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
    allocations.push_back({begin, end, host_may_use, false, "", false, {}});
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

void name_allocation(void *address, const char *name, bool input) {
    Allocation *const found = const_cast<Allocation *>(allocation_near(uintptr_t(address)));
    if (found) std::snprintf(found->name, sizeof found->name, "%s", name), found->input = input;
}

void note_filled(const void *address, size_t bytes) {
    Allocation *const found = const_cast<Allocation *>(allocation_near(uintptr_t(address)));
    if (!found) return;
    found->filled_begin = std::min(found->filled_begin, uintptr_t(address));
    found->filled_end = std::max(found->filled_end, uintptr_t(address) + bytes);
}

// What was written close to an allocation by code that is not watched.
void check_surroundings() {
    for (const Allocation &each : allocations) {
        const auto *const begin = reinterpret_cast<const unsigned char *>(each.begin);
        const auto *const end = reinterpret_cast<const unsigned char *>(each.end);
        bool same = true;
        for (int i = 1; i <= 4096; i++) same &= begin[-i] == 0xff && end[i - 1] == 0xff;
        if (!same) report("out of bounds", std::string("a write beyond ") + each.name, nullptr);
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

void take_address(const void *symbol) {
    if (Variable *const found = variable_before(uintptr_t(symbol))) found->address_taken = true;
}

bool is_gpu_address(const void *pointer) {
    const uintptr_t address = uintptr_t(pointer);
    if (is_device(pointer) || address - uintptr_t(__start_ece408_managed) <
                                  size_t(__stop_ece408_managed - __start_ece408_managed))
        return true;
    const Variable *const found = variable_before(address);
    return found && address < found->end && found->address_taken;
}

bool is_symbol(const void *pointer) {
    const Space space = space_of(uintptr_t(pointer));
    return space == Space::CONSTANT || (space == Space::PROGRAM && pointer >= __data_start);
}

void check_argument(const void *pointer, const void *code) {
    if (is_symbol(pointer) && !is_gpu_address(pointer))
        report("call", "an argument of the launch is the host's address of a variable; kernels use __constant__ and "
               "__device__ variables by their names", code);
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

// "reads 4 bytes 8 bytes past the end of window"
static std::string outside(const std::string &what, uintptr_t begin, uintptr_t end, uintptr_t address, int bytes, Operation operation) {
    const std::string place = address < begin ? bytes_text(begin - address) + " before the start of " :
                              address < end ? "across the end of " :
                              address == end ? "just past the end of " : bytes_text(address - end) + " past the end of ";
    return (operation == READ ? "reads " : "writes ") + bytes_text(bytes) + " " + place + what;
}

// Report an access of the program's own memory outside of the variable that is nearest.
static bool check_variable(uintptr_t address, int bytes, Operation operation, const void *code) {
    Variable *found = variable_before(address);
    if (found && address + bytes <= found->end) return found->used = true;
    Variable *const next = found ? found + 1 : variables.data();
    if (next < variables.data() + variables.size() && (!found || next->begin - address < address - found->end)) found = next;
    const std::string what = found->begin == uintptr_t(dynamic_shared) ? "the block's dynamic shared memory" : found->name;
    report("out of bounds", outside(what, found->begin, found->end, address, bytes, operation), code);
    return false;
}

void check_program(uintptr_t address, int bytes, Operation operation, const void *code) {
    if (address < uintptr_t(__data_start) || !check_variable(address, bytes, operation, code) || !racing) return;
    Variable &variable = *variable_before(address);
    if (!variable.guard) watch_global(variable.writes, variable.begin, variable.end, address, bytes, operation, code);
}

void check_global(uintptr_t address, int bytes, Operation operation, const void *code) {
    const Allocation *const found = allocation_near(address);
    const std::string verb = operation == READ ? "reads " : "writes ";
    if (found && !found->freed && address >= found->begin && address + bytes <= found->end) {
        if (address % bytes)
            report("misaligned", verb + bytes_text(bytes) + " at an address that is no multiple of " + std::to_string(bytes) +
                   ", which a GPU refuses", code);
        else if (operation == READ && bytes >= 2 && !std::memcmp(reinterpret_cast<const void *>(address), "\xff\xff\xff\xff", std::min(bytes, 4)) &&
                 !(bytes == 2 && may_have_value(*found, address)))  // of two bytes, -1 is an ordinary value
            report("uninitialised", "reads GPU memory that nothing has written", code);  // as device_malloc filled it
        if (found->input && operation != READ) report("input", verb + found->name, code);
        if (racing) watch_global(found->writes, found->begin, found->end, address, bytes, operation, code);
        return;
    }
    if (!found)
        return stop("out of bounds", (verb + bytes_text(bytes) + " at an address that belongs to no GPU memory").c_str(),
                    code);
    const std::string name = found->name[0] ? found->name : "an allocation of " + bytes_text(found->end - found->begin);
    if (found->freed) return report("out of bounds", verb + name + " after cudaFree", code);
    report("out of bounds", outside(name, found->begin, found->end, address, bytes, operation), code);
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

size_t shared_size() { return all_static + dynamic_bytes; }

uintptr_t shared_offset(uintptr_t address) {
    if (address - static_shared >= static_bytes) return all_static + (address - uintptr_t(dynamic_shared));
    const Variable *const found = variable_before(address);
    return found->offset + (address - found->begin);
}

size_t used_shared() {
    size_t bytes = 0;
    for (const Variable &each : variables)
        if (each.used && each.begin - static_shared < static_bytes) bytes += each.end - each.begin;
    return bytes;
}

size_t constant_bytes() {
    size_t bytes = 0;
    for (const Variable &each : variables)
        if (space_of(each.begin) == Space::CONSTANT) bytes += each.end - each.begin;
    return bytes;
}

void begin_launch() {
    variable_before(0);
    for (Variable &each : variables) each.used = false;
}

void clear_shared(size_t bytes) {
    dynamic_bytes = bytes;
    for (const Variable &each : variables)
        if (each.begin - static_shared < static_bytes)  // a guard's 1 skips the constructor, which no GPU runs either
            std::memset(reinterpret_cast<void *>(each.begin), each.guard ? 1 : 0xff, each.end - each.begin);
    std::memset(dynamic_shared, 0xff, bytes);
    written.assign(shared_size(), 0);
}

void forget_shared(uintptr_t address, int bytes) {
    const uintptr_t at = shared_offset(address);
    if (at + bytes <= written.size()) std::memset(&written[at], 0, bytes);
}

// Returns false where the access is none of the block's shared memory.
bool check_shared(uintptr_t address, int bytes, Operation operation, const void *code) {
    if (address - static_shared < static_bytes) {
        const Variable *const found = variable_before(address);
        if (found && found->guard && address < found->end) return false;  // no GPU has it
        if (!check_variable(address, bytes, operation, code)) return false;
    } else if (address + bytes > uintptr_t(dynamic_shared) + dynamic_bytes) {
        const uintptr_t begin = uintptr_t(dynamic_shared);
        report("out of bounds", outside("the block's dynamic shared memory", begin, begin + dynamic_bytes, address, bytes, operation), code);
        return false;
    }
    const uintptr_t at = shared_offset(address);
    if (address % bytes) report("misaligned", "an address of shared memory that is no multiple of its size", code);
    if (operation != WRITE)
        for (int i = 0; i < bytes; i++)
            if (!written[at + i]) {
                const char *said = "reads shared memory that no thread of the block has written";
                report("uninitialised", std::string(said) + (copies_used ? ", or before its cp.async has been waited for" : ""), code);
                break;
            }
    if (operation != READ) std::memset(&written[at], 1, bytes);
    return true;
}

}  // namespace emulator

#include <ece408_emulator.h>

#include "bind/bind.h"

namespace shoal::bind {

void gather(nb::module_&) {}

}  // namespace shoal::bind

#include "bind/bind.h"

namespace shoal::bind {

void table(nb::module_&) {}

}  // namespace shoal::bind

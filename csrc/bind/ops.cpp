#include "bind/bind.h"

namespace shoal::bind {

void ops(nb::module_&) {}

}  // namespace shoal::bind

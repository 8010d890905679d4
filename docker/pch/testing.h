// The same for the official tests.
#include "system.h"

#include <gtest/gtest.h>

// The system headers that nearly every source of the homework includes, precompiled into the image. A header that only
// a few sources need stays out: each precompiled one costs every source the templates that it leaves to instantiate.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include <Eigen/Dense>
#include <glog/logging.h>

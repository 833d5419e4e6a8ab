// The views that are mostly forms, which are requested when one of them is opened.

import "./baselines.js";
import "./rules.js";

// The views that are requested when one of them is opened.

import "./baselines.js";
import "./cases.js";
import "./flushes.js";
import "./alerts.js";
import "./quotas.js";
import "./rules.js";

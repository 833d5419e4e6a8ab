// The views that are requested when one of them is opened; forms.js has the others.

import "./alerts.js";
import "./cases.js";
import "./compare.js";
import "./flushes.js";
import "./quotas.js";

// The views that are requested when one of them is opened, and the help; forms.js has the other views.

import "./alerts.js";
import "./cases.js";
import "./compare.js";
import "./flushes.js";
import "./help.js";
import "./quotas.js";

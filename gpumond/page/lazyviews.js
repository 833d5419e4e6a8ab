// What is requested when it is opened: views, the help and the dialog of a program's memory. forms.js has the other views,
// and the form for a token.

import "./alerts.js";
import "./cases.js";
import "./compare.js";
import "./receipts.js";
import "./help.js";
import "./queue.js";
import "./quotas.js";
import { why as showWhy } from "./why.js";

export const why = showWhy;

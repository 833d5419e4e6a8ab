// The daemon's stream of frames: messages of server-sent events, each with a complete frame or with changes.

/** Calls `receive(kind, content)` with each message, and `receive()` with each comment, until the stream ends. */
export async function readMessages(body, receive) {
  const reader = body.getReader();
  const decoder = new TextDecoder(); // a stream of texts would add a task for each part
  let parts = []; // of the next message: a complete frame arrives in a hundred
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const text = decoder.decode(value, { stream: true });
    parts.push(text);
    if (!text.includes("\n")) continue;
    const messages = parts.join("").split("\n\n");
    parts = [messages.pop()];
    for (const message of messages) {
      const [head, kind] = /^event: (\w+)\ndata: /.exec(message) ?? [];
      receive(kind, kind && JSON.parse(message.slice(head.length)));
    }
  }
}

/** Changes a frame into the next one; `/docs` describes the format. */
export function applyChanges(frame, { values, tables }) {
  for (const [path, value] of Object.entries(values)) {
    const [owner, name] = place(frame, path);
    owner[name] = value;
  }
  for (const [path, { rows, added, cells = {} }] of Object.entries(tables)) {
    const [owner, name] = place(frame, path);
    let next = 0;
    if (rows) owner[name] = rows.map((row) => (row < 0 ? added[next++] : owner[name][row]));
    for (const [cell, [changed, found]] of Object.entries(cells)) {
      const way = cell.split(".");
      const field = way.pop();
      changed.forEach((row, index) => (way.reduce((value, key) => value[key], owner[name][row])[field] = found[index]));
    }
  }
}

function place(frame, path) {
  const [part, name] = path.split(".");
  return name ? [frame[part], name] : [frame, part];
}

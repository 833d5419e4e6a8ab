// Requests the stream before the module has arrived: the daemon writes the first frame while the browser reads the page.

function openStream() {
  const ending = new AbortController();
  const answer = fetch("api/v1/live", { cache: "no-store", signal: ending.signal });
  answer.catch(() => {}); // whoever waits for it is told
  return { ending, answer };
}

const earlyStream = document.hidden ? null : openStream();

// What outlasts a reload: the conversation and the settings, never a key.

const NAME = "penstock.chat", CHARACTERS = 1_000_000; // browsers store about 5 million for a site

export function load() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME));
    return { conversation: Array.isArray(found?.conversation) ? found.conversation : [], fields: found?.fields ?? {} };
  } catch {
    return { conversation: [], fields: {} };
  }
}

// Returns what could not be stored, as a sentence, or "".
export function store(conversation, fields) {
  let first = 0, text = JSON.stringify({ conversation, fields });
  while (text.length > CHARACTERS && first < conversation.length) {
    first += 2; // a message and its answer
    text = JSON.stringify({ conversation: conversation.slice(first), fields });
  }
  try {
    localStorage.setItem(NAME, text);
  } catch {
    return "The browser stores nothing: a reload loses this conversation.";
  }
  return first ? "The conversation is long: a reload loses its first messages." : "";
}

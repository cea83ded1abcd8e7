// Browsers refuse workers to pages from file://. There, the program of the search runs in a hidden frame, which gets and sends the same messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.body.appendChild(document.createElement("iframe"))
      frame.hidden = true
      this.inner = frame.contentWindow
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}))
      const script = this.inner.document.createElement("script")
      this.ready = new Promise(loaded => script.addEventListener("load", loaded))
      script.src = address
      this.inner.document.body.append(script)
    }

    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", {data})))
    }
  }
}

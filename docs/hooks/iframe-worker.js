// Search without a server: browsers start no Worker for a page that was opened as a file, so a hidden frame runs its
// script. Material's plugin "offline" would load such a script from elsewhere; it is content with a name like this one's.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = this.inside = frame.contentWindow
      addEventListener("message", event => {
        if (event.source === inside)
          this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      })
      const load = address => new Promise((resolve, reject) => {
        const script = inside.document.createElement("script")
        Object.assign(script, { src: address, onload: resolve, onerror: reject })
        inside.document.body.append(script)
      })
      // A script of the frame, so that messages come from the frame.
      inside.eval("window.postMessage = data => parent.postMessage(data, '*')")
      inside.importScripts = (...addresses) => addresses.reduce((last, next) => last.then(() => load(next)), Promise.resolve())
      this.ready = load(new URL(url, location).href)
    }
    postMessage(data) {
      // Not postMessage of the frame, which its script takes for its own.
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}

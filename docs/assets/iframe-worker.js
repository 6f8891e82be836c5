// Runs the search in a hidden iframe when the site is read from the disk: browsers start no Worker on file: pages.
// The theme's offline plugin would load such a script from the network; pages must load nothing from elsewhere.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.onmessage = null
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.window = frame.contentWindow
      window.addEventListener("message", (event) => {
        if (event.source !== this.window) return
        const copy = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(copy)
        if (this.onmessage) this.onmessage(copy)
      })
      this.loaded = new Promise((resolve) => {
        this.window.postMessage = (data) => parent.window.dispatchEvent(
          new MessageEvent("message", { data, source: this.window })
        )
        this.window.importScripts = (...urls) => urls.reduce(
          (before, each) => before.then(() => load(this.window.document, each)), Promise.resolve()
        )
        load(this.window.document, new URL(url, document.baseURI)).then(resolve)
      })
    }

    postMessage(data) {
      this.loaded.then(() => this.window.dispatchEvent(new this.window.MessageEvent("message", { data })))
    }

    terminate() {
      this.window.frameElement.remove()
    }
  }

  const load = (page, url) => new Promise((resolve, reject) => {
    const script = page.createElement("script")
    script.onload = resolve
    script.onerror = reject
    script.src = url
    page.body.appendChild(script)
  })

  window.IFrameWorker = IFrameWorker
  window.Worker = IFrameWorker
}

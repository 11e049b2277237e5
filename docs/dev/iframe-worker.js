// Search from a disk: a browser starts no worker from a file, so that its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script>
        postMessage = (data) => frameElement.answer(data);
        importScripts = async (...urls) => {
          for (const src of urls)
            await new Promise((onload) => document.head.append(Object.assign(document.createElement("script"), { src, onload })));
        };
      </script><script src="${url}"></script>`;
      frame.answer = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.started = new Promise((done) => frame.addEventListener("load", () => done(frame.contentWindow)));
      document.body.append(frame);
    }
    postMessage(data) {
      this.started.then((frame) => frame.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}

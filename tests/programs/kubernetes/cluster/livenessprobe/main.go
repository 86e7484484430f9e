// Stands in for livenessprobe of the Kubernetes project, with the flags that our DaemonSet gives it: answers kubelet's
// HTTP probes with what the driver answers to the call Probe of CSI.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	socket := flag.String("csi-address", "/run/csi/socket", "the driver's socket")
	port := flag.Int("health-port", 9808, "where to answer /healthz")
	timeout := flag.Duration("probe-timeout", time.Second, "how long the driver may take")
	flag.Parse()
	connection, err := grpc.NewClient("unix://"+*socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		log.Fatal(err)
	}
	driver := csi.NewIdentityClient(connection)
	http.HandleFunc("/healthz", func(response http.ResponseWriter, request *http.Request) {
		ctx, cancel := context.WithTimeout(request.Context(), *timeout)
		defer cancel()
		answer, err := driver.Probe(ctx, &csi.ProbeRequest{})
		if err == nil && answer.GetReady() != nil && !answer.GetReady().GetValue() {
			err = fmt.Errorf("the driver is not ready")
		}
		if err != nil {
			log.Print(err)
			http.Error(response, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprintln(response, "ok")
	})
	log.Fatal(http.ListenAndServe(fmt.Sprintf(":%d", *port), nil))
}

// Stands in for node-driver-registrar of the Kubernetes project, with the flags that our DaemonSet gives it: tells
// kubelet, by its plugin watcher's API (k8s.io/kubelet/pkg/apis/pluginregistration/v1), where the driver's socket is.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

type server struct {
	registration.UnimplementedRegistrationServer
	driver, endpoint string
}

func (s server) GetInfo(context.Context, *registration.InfoRequest) (*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type: registration.CSIPlugin, Name: s.driver, Endpoint: s.endpoint, SupportedVersions: []string{"1.0.0"},
	}, nil
}

// A failed registration ends the container, which kubelet starts again.
func (s server) NotifyRegistrationStatus(
	_ context.Context, status *registration.RegistrationStatus,
) (*registration.RegistrationStatusResponse, error) {
	if !status.PluginRegistered {
		log.Fatalf("kubelet does not register %s: %s", s.driver, status.Error)
	}
	log.Printf("registered %s", s.driver)
	return &registration.RegistrationStatusResponse{}, nil
}

func name(socket string) (string, error) {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return "", err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	info, err := csi.NewIdentityClient(connection).GetPluginInfo(
		ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	return info.GetName(), err
}

// Answers kubelet's HTTP probes, as the genuine one does: whether this registrar can be reached by its socket, which
// another one may have removed.
func answerProbes(endpoint, socket, driver string) {
	http.HandleFunc("/healthz", func(response http.ResponseWriter, request *http.Request) {
		ctx, cancel := context.WithTimeout(request.Context(), time.Second)
		defer cancel()
		err := reach(ctx, socket, driver)
		if err != nil {
			log.Print(err)
			http.Error(response, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprintln(response, "ok")
	})
	log.Fatal(http.ListenAndServe(endpoint, nil))
}

func reach(ctx context.Context, socket, driver string) error {
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer connection.Close()
	info, err := registration.NewRegistrationClient(connection).GetInfo(ctx, &registration.InfoRequest{})
	if err == nil && info.Name != driver {
		err = fmt.Errorf("%s is the socket of %s", socket, info.Name)
	}
	return err
}

func main() {
	driver := flag.String("csi-address", "/run/csi/socket", "the driver's socket, here")
	endpoint := flag.String("kubelet-registration-path", "", "the same, on the node")
	directory := flag.String("plugin-registration-path", "/registration", "where kubelet looks for sockets, here")
	probes := flag.String("http-endpoint", "", "where to answer /healthz; nowhere, if it is empty")
	flag.Parse()
	found, err := name(*driver)
	if err != nil {
		log.Fatal(err)
	}
	socket := filepath.Join(*directory, found+"-reg.sock")
	if err := os.Remove(socket); err != nil && !os.IsNotExist(err) {
		log.Fatal(err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		log.Fatal(err)
	}
	if *probes != "" {
		go answerProbes(*probes, socket, found)
	}
	serving := grpc.NewServer()
	registration.RegisterRegistrationServer(serving, server{driver: found, endpoint: *endpoint})
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGTERM)
	go func() {
		<-ended
		serving.Stop() // closes the listener, which removes the socket
	}()
	if err := serving.Serve(listener); err != nil {
		log.Fatal(err)
	}
}
